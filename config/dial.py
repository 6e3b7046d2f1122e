"""One number, the depth, sets all others: python train.py config/dial.py --n_layer=3

Width and heads follow the depth; the number of tokens follows the parameters of the blocks; batch, steps and rates
follow the tokens and the width. Any other key can be given too, and the rest follows it. For the time, the memory and
the cost: python profile.py config/dial.py --n_layer=12 --mode=predict --gpu=H100 --price_per_hour=2.5 (docs/dial.md)
"""

n_layer = 2
out_dir = f"out/dial_{n_layer}"
dataset = "python_packages"
n_embd = 64 * n_layer
n_head = n_layer  # of 64 channels
context_length = min(1024, 128 * n_layer)
_tokens = 10 * 12 * n_layer * n_embd**2  # ten for each parameter of the blocks
_batch_tokens = 2048 * (_tokens / 1e6) ** 0.383  # Bergsma et al. 2025, "Power Lines": https://arxiv.org/abs/2505.13738
batch_size = max(1, round(_batch_tokens / context_length))
max_steps = round(_tokens / (batch_size * context_length))
warmup_steps = min(40, max_steps // 10)
# Best for width 128 and 2,048 tokens a step: 0.018 in 64 steps, 0.012 in 256 (results/*/recipe_small_by_loss)
learning_rate = 0.012 * (256 / max_steps) ** 0.3 * (128 / n_embd) * (batch_size * context_length / 2048) ** 0.5
min_lr = 0.05 * learning_rate
weight_decay = 0.05  # each step decays by this times the rate
beta2 = 0.99
# The second ladder's rungs (docs/recipe.md)
optimizer = "muon"
position = "rotary"
qk_norm = True
x0_skip = True
value_embedding = True
key_offset = True
split_qkv = True
polar_express = True
embedding_norm = True
embedding_lr = 4.0
scalar_lr = 4.0
smear = True
zero_init = True
eval_interval = -(-max_steps // 4)
eval_windows = 256
sample_interval = max_steps
save_interval = eval_interval
