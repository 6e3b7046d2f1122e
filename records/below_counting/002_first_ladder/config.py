"""GPT-2's recipe, its learning rate tuned, in the first ladder's loop."""

dataset = "python_packages"
n_layer = 2
n_head = 2
n_embd = 128
context_length = 256
batch_size = 8
max_steps = 6800
warmup_steps = 200
learning_rate = 5e-3  # of 2.5e-3, 5e-3, 1e-2 and 2e-2, the best with which every seed learns to copy
min_lr = 5e-4
beta2 = 0.99
num_workers = 0  # cutting a batch takes less time than receiving it from a worker
eval_interval = 6800  # at the end alone
eval_windows = 256
save_interval = 0
