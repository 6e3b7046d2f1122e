"""Reference model of the measurements: 3.3 M parameters, on the bytes of the Python standard library."""

out_dir = "out/reference"
dataset = "python_stdlib_byte"
n_layer = 4
n_head = 4
n_embd = 256
context_length = 512
batch_size = 32
max_steps = 2000
learning_rate = 1e-3
min_lr = 1e-4
warmup_steps = 100
