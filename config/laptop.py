"""Both ladders on a laptop: the loss of laptop_gpt2.py on a fifteenth of its tokens.

6.3M parameters, 2.1M of them value embeddings; the finished loop with the rungs of docs/recipe.md.
To race the two: python profile.py config/laptop.py --mode=race --against=config/laptop_gpt2.py
"""

out_dir = "out/laptop"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 4  # 140 steps of 4 end at 1.683 bits per byte where 70 of 8 end at 1.743
max_steps = 96
warmup_steps = 14
learning_rate = 7e-3
min_lr = 1.4e-3
weight_decay = 0.05  # each step decays by this times the rate
beta2 = 0.99
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
compile = False  # compiling takes longer than it saves in a run this short
eval_interval = 96  # only at the end
eval_windows = 64
save_interval = 0
