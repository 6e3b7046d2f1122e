"""Six minutes a run on one CPU thread: the second scale of `profile.py --mode=recipe`, for the finished recipe.

7.4M parameters on 0.98 million tokens; twice as long a run is still within one epoch of the default corpus.
"""

out_dir = "out/recipe_medium"
dataset = "python_stdlib"
n_layer = 8
n_head = 4
n_embd = 256
context_length = 256
batch_size = 8  # 2,048 tokens, as recipe_small
max_steps = 480
warmup_steps = 40
learning_rate = 1.25e-3  # a quarter of recipe_small's, at twice the width
min_lr = 1.25e-4
beta2 = 0.99
eval_interval = 480  # only at the end
eval_windows = 512
save_interval = 0
num_workers = 0
attention = "matmul"
compile = True
