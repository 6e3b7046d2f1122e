"""AdamW keeps its two averages of each parameter in 8 bits: its state takes 2 bytes a parameter, not 8.

What: torchao's `AdamW8bit`. An average is stored in blocks of 256 numbers, each as one of 256 fractions of the block's
largest; the update itself is computed in float32. Tensors of fewer than 4096 numbers stay as they are.
Why: AdamW's two float32 averages are twice the weights: with them and the gradients, 16 bytes a parameter become 10.
Cost: rounding, and a kernel for each tensor, compiled at its first step; with `--compile=False` dozens of small ones
for each tensor. Other optimizers, some with less state, are in docs/optimizers.md.
Source:
- Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": https://arxiv.org/abs/2110.02861
- torchao.optim: https://docs.pytorch.org/ao/stable/api_reference/api_ref_optim.html
"""

optimizer = "adamw8bit"
