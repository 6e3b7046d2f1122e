"""Both ladders on a laptop: the loss of laptop_gpt2.py on 4.5 times fewer tokens.

4.2M parameters; the rungs that hold and save time in docs/recipe.md, in the finished loop. To race the two:
python profile.py config/laptop.py --mode=race --against=config/laptop_gpt2.py
"""

out_dir = "out/laptop"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 8  # not 4: Muon's update costs the same for any number of tokens
max_steps = 160
warmup_steps = 16
learning_rate = 3.5e-3  # 2.5e-3 and 5e-3 are within 0.01 bits per byte
min_lr = 3.5e-4
beta2 = 0.99
optimizer = "muon"
position = "rotary"
qk_norm = True
embedding_skip = True
compile = False  # compiling takes longer than it saves in so short a run
eval_interval = 160  # at the end alone
eval_windows = 64
save_interval = 0
