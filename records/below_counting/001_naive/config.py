"""GPT-2's recipe, its learning rate tuned, in the naive loop: 1M parameters, 13.9 million tokens."""

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
set_to_none = False
lazy_metrics = False
num_workers = 0
keep_memory = False
matmul_precision = "highest"
dtype = "float32"
attention = "matmul"
adamw_impl = "forloop"
pad_vocab_to = 1
compile = False
loss_chunks = 0
cuda_graph = False
eval_interval = 6800  # at the end alone
eval_windows = 256
save_interval = 0
