"""Fine-tunes OpenAI's GPT-2, 124M parameters, on the works of Shakespeare: nanoGPT's recipe, on half the context.

python data/shakespeare/prepare.py

docs/fine-tuning.md says which loss and how much memory to expect, and how to take a larger model or your own text.
"""

out_dir = "out/finetune_shakespeare"
dataset = "shakespeare"
init_from = "hf:gpt2"  # or hf:FOLDER; the model gives the shape
context_length = 512  # the first of GPT-2's 1024 positions
dropout = 0.1  # the text is short: 302,000 tokens, nine steps an epoch
batch_size = 64
micro_batch_size = min(8, batch_size)
max_steps = 20
learning_rate = 3e-5
min_lr = learning_rate  # constant
warmup_steps = 0
log_interval = 1
eval_interval = 5
eval_windows = 0  # all
save_interval = 20
