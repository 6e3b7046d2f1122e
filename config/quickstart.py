"""Minutes on two CPU cores: a small GPT that writes something like Python.

So short a run is best spent on steps: at equal cost this width came to 1.74 bits per byte where 192 came to 1.86.
"""

out_dir = "out/quickstart"
dataset = "python_stdlib"
n_layer = 4
n_head = 2
n_embd = 128
context_length = 128
batch_size = 16
max_steps = 700
optimizer = "muon"  # AdamW needs more than twice as many steps, each at most a seventh shorter
learning_rate = 1.2e-2
min_lr = 4e-4
weight_decay = 0.05  # a step multiplies it by the rate
warmup_steps = 40
beta2 = 0.99
log_interval = 10
eval_interval = 150
sample_interval = 50  # a line of text, the first within a minute
save_interval = 150
attention = "matmul"  # on a CPU with so short a context no slower than the fused kernel, with bfloat16 1.15× as fast
compile = False  # compiling takes a CPU longer than it saves in so short a run
