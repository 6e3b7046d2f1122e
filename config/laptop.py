"""Both ladders on a laptop: the loss of laptop_gpt2.py, the same size trained as GPT-2 was, in less than a quarter of its tokens.

4.2M parameters, the rungs that hold in docs/recipe.md and gain time, in the finished loop.
"""

out_dir = "out/laptop"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 8  # Muon's update costs the same for any number of tokens
max_steps = 170
warmup_steps = 17
learning_rate = 3.5e-3  # of 2.5e-3, 3.5e-3 and 5e-3
min_lr = 3.5e-4
beta2 = 0.99
optimizer = "muon"
position = "rotary"
qk_norm = True
embedding_skip = True
compile = False  # compiling takes longer than it saves in so short a run
eval_interval = 170  # at the end alone
eval_windows = 64
save_interval = 0
