"""AdamW's moments have 8 bits: its state is 2 bytes/parameter, not 8.

Stands on: grad_accumulation
What: torchao's `AdamW8bit`. A moment is stored in blocks of 256 numbers, each as one of 256 fractions of the largest in
its block; the update is computed in float32. Tensors of fewer than 4096 numbers are not quantized.
Why: AdamW's two float32 moments take twice the memory of the weights. Weights, gradients and moments together take
10 bytes per parameter instead of 16.
Cost: quantization error, and one compiled kernel per tensor, built in the first step; with `--compile=False` dozens of
small kernels per tensor. docs/optimizers.md has more optimizers, some with even less state.
Tried: on a CPU it was slower: with a model as small as the quickstart's, the 8-bit update took a step from 215 ms to
520.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=H100 --vocab_size=50257 --batch_size=32 --micro_batch_size=0
--stages=grad_accumulation,low_memory_optimizer`: the optimizer's 1 GB becomes a quarter.
Source:
- Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": https://arxiv.org/abs/2110.02861
- torchao.optim: https://docs.pytorch.org/ao/stable/api_reference/api_ref_optim.html
"""

optimizer = "adamw8bit"
