"""Two minutes on two CPU cores: a small GPT that writes something like Python."""

out_dir = "out/quickstart"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 192
context_length = 128
batch_size = 16
max_steps = 1400
learning_rate = 2e-3
min_lr = 2e-4
warmup_steps = 50
beta2 = 0.99
log_interval = 10
eval_interval = 200
save_interval = 200
attention = "matmul"  # the fused kernel is slower on a CPU with so short a context (profile.py --mode=without: 1.34×)
compile = False  # compiling takes a CPU longer than it saves in so short a run
