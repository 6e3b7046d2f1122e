"""GPT-2 1558M (Radford et al. 2019), about half a million tokens a step. Prepare a corpus with GPT-2's tokenizer:

python data/text/prepare.py --input FILES --tokenizer=gpt2
torchrun --standalone --nproc_per_node=8 train.py config/gpt2_xl.py --shard=full

Each of the eight GPUs then needs 32.1 GB for tensors, without CUDA's context, as predicted by
`python profile.py config/gpt2_xl.py --mode=predict --shard=full --world_size=8`.
"""

out_dir = "out/gpt2_xl"
dataset = "text_gpt2"
n_layer = 48
n_head = 25
n_embd = 1600
context_length = 1024
vocab_size = 50257
batch_size = 480
micro_batch_size = min(10, batch_size)  # sharded, for 40 GB or more; auto: as many as fit
max_steps = 600_000
learning_rate = 2e-4
min_lr = 2e-5
warmup_steps = 2000
eval_interval = 1000
save_interval = 1000
