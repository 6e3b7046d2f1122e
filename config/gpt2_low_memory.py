"""GPT-2 124M (Radford et al. 2019) in 1.3 GB of a GPU's memory, float32 weights included. Prepare a corpus first:

python data/text/prepare.py --input FILES --tokenizer=gpt2

Predicted by `python profile.py config/gpt2_low_memory.py --mode=predict --stages=naive`: 1.26 GB of tensors, CUDA's
context apart, of which the weights are 0.50, the largest gradient 0.15 and the optimizer's state 0.001. Measured on a
CPU, where products are in bfloat16: 1.18 GB, and 1.96 GB of resident memory.
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
learning_rate = 6e-4  # at GPT-2's batch
min_lr = 6e-5
lr_scaling = "sqrt"
lr_reference_batch = 480
warmup_steps = 2000
loss_chunks = 64
checkpointing = "every:1"
compile_scope = "block"  # the gradients of a block arrive together, those of the model do not
optimizer = "adafactor"  # 0.01 bytes of state a parameter
optimizer_in_backward = True  # no two gradients at once
grad_clip = 0.0
eval_interval = 1000
save_interval = 1000
