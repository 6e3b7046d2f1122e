"""GPT-2 124M (Radford et al. 2019) in 1.0 GB of GPU memory, float32 weights included. Prepare a corpus first:

python data/text/prepare.py --input FILES --tokenizer=gpt2

Predicted by `python profile.py config/gpt2_low_memory.py --mode=predict --stages=naive`: 1.03 GB of tensors, without
CUDA's context; the weights take 0.50 of it, the largest gradient 0.15 and the optimizer state 0.001. Measured on a CPU
with products in bfloat16: 1.18 GB of tensors and 1.96 GB of resident memory.
"""

out_dir = "out/gpt2_low_memory"
dataset = "text_gpt2"
n_layer = 12
n_head = 12
n_embd = 768
context_length = 1024
vocab_size = 50257
batch_size = 4
max_steps = 600_000
learning_rate = 6e-4 * (batch_size / 480) ** 0.5  # 6e-4 is GPT-2's, at its batch of 480 sequences
min_lr = learning_rate / 10
warmup_steps = 2000
loss_chunks = 64
activation_checkpointing = "every:1"
optimizer = "adafactor"  # 0.01 bytes of state per parameter
optimizer_in_backward = True  # each gradient is freed before the next arrives
grad_clip = 0.0
eval_interval = 1000
save_interval = 1000
