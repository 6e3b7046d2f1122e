"""Both ladders on a laptop: the loss of laptop_gpt2.py on 4.3 times fewer tokens.

6.3M parameters, 2.1M of them value embeddings; the finished loop with the five rungs that hold in docs/recipe.md.
To race the two: python profile.py config/laptop.py --mode=race --against=config/laptop_gpt2.py
"""

out_dir = "out/laptop"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 8  # not 4: Muon's update costs the same for any number of tokens
max_steps = 168
warmup_steps = 16
learning_rate = 7e-3  # 5e-3 and 1e-2 are within 0.01 bits per byte
min_lr = 1.4e-3  # the best of 0, 7e-4, 1.4e-3 and 2.8e-3
weight_decay = 0.05  # a step multiplies it by the rate
beta2 = 0.99
optimizer = "muon"
position = "rotary"
qk_norm = True
x0_skip = True
value_embedding = True
loss_chunks = 1  # not auto, which is 0 here: head and loss as one operator are faster without compiling
compile = False  # compiling takes longer than it saves in so short a run
eval_interval = 168  # at the end alone
eval_windows = 64
save_interval = 0
