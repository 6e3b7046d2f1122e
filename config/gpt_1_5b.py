"""GPT with 1512M parameters, a million tokens a step, as GPT-3's models of this size (Brown et al. 2020).

Where GPT-2 XL has 48 narrow blocks of 25 heads, this one has 28 wide ones of 16 heads of 128 channels, which divide
among 2, 4, 8 or 16 GPUs (docs/parallelism.md). Prepare a corpus with GPT-2's tokenizer:

python data/text/prepare.py --input FILES --tokenizer=gpt2
torchrun --standalone --nproc_per_node=8 train.py config/gpt_1_5b.py --shard=full
torchrun --standalone --nproc_per_node=8 train.py config/gpt_1_5b.py --shard=full --tensor_parallel=2
"""

out_dir = "out/gpt_1_5b"
dataset = "text_gpt2"
n_layer = 28
n_head = 16
n_embd = 2048
context_length = 1024
vocab_size = 50257
batch_size = 1024
micro_batch_size = min(8, batch_size)  # sharded, for 40 GB or more; auto: as many as fit
max_steps = 30_000  # 20 tokens for each parameter (Hoffmann et al. 2022)
learning_rate = 2e-4
min_lr = 2e-5
warmup_steps = 400
eval_interval = 1000
save_interval = 1000
