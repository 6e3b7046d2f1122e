"""Character-level GPT on the works of Shakespeare, nanoGPT's recipe for one GPU: 10.7 M parameters."""

out_dir = "out/shakespeare_char"
dataset = "shakespeare_char"
n_layer = 6
n_head = 6
n_embd = 384
context_length = 256
dropout = 0.2
batch_size = 64
max_steps = 5000
learning_rate = 1e-3
min_lr = 1e-4
warmup_steps = 100
beta2 = 0.99
