"""Shakespeare by characters, to the loss of nanoGPT's command for a laptop, 1.88, in seconds on two CPU cores.

0.228M parameters on a fifth of an epoch: so short a run is best spent on steps. Four layers of 128 channels came to
1.90 at nearly twice the cost at which two of 96 came to 1.865. The context is 128 characters; nanoGPT's 64 came to
1.873. Seven seeds end at 1.827 to 1.865; after 180 steps two of three had missed 1.88.
To race the two: python profile.py config/shakespeare_minute.py --mode=race --nanogpt=PATH
"""

out_dir = "out/shakespeare_minute"
dataset = "shakespeare_char"
n_layer = 2
n_head = 2
n_embd = 96
context_length = 128
batch_size = 8  # of four layers, 120 steps of 8 ended at 1.912 where 60 of 16 ended at 1.977
max_steps = 220
warmup_steps = 12
learning_rate = 3e-2
min_lr = 3e-3
weight_decay = 0.05  # each step decays by this times the rate
beta2 = 0.99
# The second ladder's rungs (docs/recipe.md) but two: on two seeds it ended 0.017 lower without key_offset and
# value_embedding
optimizer = "muon"
position = "rotary"
qk_norm = True
x0_skip = True
split_qkv = True
polar_express = True
embedding_norm = True
embedding_lr = 4.0
scalar_lr = 4.0
smear = True
zero_init = True
loss_chunks = 1  # not auto, which is 0 here: without compiling, head and loss are faster as one operator
attention = "matmul"  # with a context this short, a CPU's fused kernel is no faster
compile = False  # compiling takes longer than the run
eval_interval = 220  # only at the end
eval_windows = 0  # the whole validation split
save_interval = 220
