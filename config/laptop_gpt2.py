"""GPT-2's recipe at a size that a laptop trains in minutes, its learning rate tuned: laptop.py races against it.

4.3M parameters, four blocks of the reference model's width and context, on 2.95 million tokens: one epoch.
"""

out_dir = "out/laptop_gpt2"
dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 4  # 2,048 tokens, like recipe_small
max_steps = 1440
warmup_steps = 60
learning_rate = 1.25e-3  # the best of 6.25e-4, 1.25e-3, 2.5e-3 and 5e-3
min_lr = 5e-4  # the best of 1.25e-4, 2.5e-4, 5e-4 and 1e-3
beta2 = 0.99
eval_interval = 1440  # only at the end
eval_windows = 64
save_interval = 0
