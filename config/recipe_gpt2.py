"""GPT-2 124M for `profile.py --mode=recipe` on one GPU, a run of 0.5 billion tokens. It has not been run here yet.

Expected: tuned AdamW takes 1.35 (modded-nanogpt) to 1.4 times Muon's tokens at this size, and 1.1 times
at 1.2 billion parameters (Wen et al. 2025, "Fantastic Pretraining Optimizers": https://arxiv.org/abs/2509.02046).
"""

out_dir = "out/recipe_gpt2"
dataset = "text_gpt2"
n_layer = 12
n_head = 12
n_embd = 768
context_length = 1024
vocab_size = 50257
batch_size = 128
micro_batch_size = 32
max_steps = 3800
warmup_steps = 200
learning_rate = 1.8e-3
min_lr = 1.8e-4
eval_interval = 3800  # only at the end
eval_windows = 1024
save_interval = 0
