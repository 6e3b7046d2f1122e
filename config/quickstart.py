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
max_steps = 220
learning_rate = 2e-2
min_lr = 2e-3
weight_decay = 0.05  # a step multiplies it by the rate
warmup_steps = 24
beta2 = 0.99
# The second ladder's rungs (docs/recipe.md): with Muon alone 700 steps ended at 1.64 bits per byte
optimizer = "muon"
position = "rotary"
qk_norm = True
x0_skip = True
value_embedding = True
key_offset = True
split_qkv = True
polar_express = True
embedding_norm = True
embedding_lr = 4.0
scalar_lr = 4.0
smear = True
log_interval = 10
eval_interval = 110
sample_interval = 55  # a line of text, the first within half a minute
save_interval = 110
loss_chunks = 1  # not auto, which is 0 here: head and loss as one operator are faster without compiling
attention = "matmul"  # on a CPU with so short a context no slower than the fused kernel, with bfloat16 1.15× as fast
compile = False  # compiling takes a CPU longer than it saves in so short a run
