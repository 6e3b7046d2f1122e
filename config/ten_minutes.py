"""Ten minutes on two CPU cores, to a loss below what counting trigrams and copying from the context reach.

6.3M parameters, 2.1M of them value embeddings: laptop.py in six times its steps. It ended at 1.297 bits per byte, where
counting reaches 1.408; 900 steps ended at 1.204.
"""

out_dir = "out/ten_minutes"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 4
max_steps = 560
warmup_steps = 40
learning_rate = 6e-3
min_lr = 3e-4
weight_decay = 0.05  # each step decays by this times the rate
beta2 = 0.99
# The second ladder's rungs (docs/recipe.md)
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
zero_init = True
loss_chunks = 1  # not auto, which is 0 here: without compiling, head and loss are faster as one operator
compile = False  # compiling takes longer than it saves
eval_interval = 280
eval_windows = 64
sample_interval = 280
save_interval = 280
