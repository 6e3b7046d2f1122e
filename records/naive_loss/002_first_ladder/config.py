"""GPT-2's recipe, its learning rate tuned, in the first ladder's loop."""

dataset = "python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 4
max_steps = 1440
warmup_steps = 60
learning_rate = 1.25e-3  # the best of 6.25e-4, 1.25e-3, 2.5e-3 and 5e-3
min_lr = 5e-4  # the best of 1.25e-4, 2.5e-4, 5e-4 and 1e-3
beta2 = 0.99
eval_interval = 1440  # at the end alone
eval_windows = 64
save_interval = 0
