"""GPT-2's recipe, its learning rate tuned, in the naive loop: 4.3M parameters, 2.95 million tokens."""

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
eval_interval = 1440  # at the end alone
eval_windows = 64
save_interval = 0
