"""GPT-2 774M (Radford et al. 2019), about half a million tokens a step. Prepare a corpus with GPT-2's tokenizer:

python data/text/prepare.py --input FILES --tokenizer=gpt2
"""

out_dir = "out/gpt2_large"
dataset = "text_gpt2"
n_layer = 36
n_head = 20
n_embd = 1280
context_length = 1024
vocab_size = 50257
batch_size = 480
micro_batch_size = min(12, batch_size)  # for 40 GB or more; auto: as many as fit
max_steps = 600_000
learning_rate = 2.5e-4
min_lr = 2.5e-5
warmup_steps = 2000
eval_interval = 1000
save_interval = 1000
