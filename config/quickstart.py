"""A small GPT that writes something like Python, in minutes on two CPU cores.

A run this short needs steps more than width: at equal cost, this width reached 1.74 bits per byte and 192 reached 1.86.
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
weight_decay = 0.05  # each step decays by this times the rate
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
sample_interval = 55  # the first sample comes within half a minute
save_interval = 110
loss_chunks = 1  # not auto, which is 0 here: without compiling, head and loss are faster as one operator
attention = "matmul"  # a CPU's fused kernel is no faster with a context this short; in bfloat16 this is 1.15× as fast
compile = False  # compiling takes longer than it saves in a run this short
