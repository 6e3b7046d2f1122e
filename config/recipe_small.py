"""A minute a run on one CPU thread: the size at which `profile.py --mode=recipe` measures the rungs of a recipe.

1.33M parameters on 1.47 million tokens: twice as long a run is still within one epoch of the default corpus.
"""

out_dir = "out/recipe_small"
dataset = "python_stdlib"
n_layer = 4
n_head = 2
n_embd = 128
context_length = 128
batch_size = 16
max_steps = 720
warmup_steps = 40
learning_rate = 5e-3  # AdamW's best of 2e-3, 5e-3 and 1e-2: GPT-2's 6e-4 is for 124 million parameters
min_lr = 5e-4
beta2 = 0.99  # batches of 2,048 tokens are noisy, and so are their mean squares
eval_interval = 720  # only at the end
eval_windows = 1024
save_interval = 0
num_workers = 0  # cutting a batch takes less time than receiving it from a worker
attention = "matmul"  # with a context this short, a CPU's fused kernel is no faster
compile = True  # 77 ms a step with one thread; 207 without
