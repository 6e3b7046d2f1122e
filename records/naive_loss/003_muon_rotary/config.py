"""The five rungs that hold, in the first ladder's loop: 6.3M parameters, 0.69 million tokens."""

dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 8
max_steps = 168
warmup_steps = 16
learning_rate = 7e-3
min_lr = 1.4e-3
weight_decay = 0.05  # a step multiplies it by the rate
beta2 = 0.99
optimizer = "muon"
position = "rotary"
qk_norm = True
x0_skip = True
value_embedding = True
loss_chunks = 1  # head and loss as one operator are faster without compiling
compile = False  # compiling takes longer than it saves in so short a run
eval_interval = 168  # at the end alone
eval_windows = 64
save_interval = 0
