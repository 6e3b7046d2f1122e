"""Matrices are multiplied in float8, each with a scale of its own.

Stands on: cuda_graph
What: the products of the blocks, in the forward and both of the backward, and the head's logits. Each of their inputs
is divided by a scale that makes its largest number the dtype's largest, and rounded to 8 bits: e4m3 for weights and
activations, e5m2 for gradients. `torch._scaled_mm` multiplies; for the logits, the loss's Triton kernel does.
Why: tensor cores from Hopper on multiply float8 at twice the rate of bfloat16, and the backward keeps half the bytes.
Cost: numbers keep 3 bits of mantissa, gradients 2, so a step learns less. Finding scales, rounding and transposing, as
Hopper multiplies rows by rows, take time that only large matrices repay: nanochat was slower with 12 layers, and with
26 it got 17 % more tokens/s, worth 5 % at equal quality; torchtitan got 28 % with 8B. GPUs before Hopper are refused; a
CPU emulates the blocks' products. Validation is in float8, too; `evaluate.py` and `sample.py` are not.
Tried: on random numbers we gave every row a scale, and rounded scales to powers of two. A product of e4m3 is exact to
3.7 % in all three cases, so each tensor has one scale.
Try: `python -c "import torch; print(torch.tensor([1.05, 1.1, 448.0]).to(torch.float8_e4m3fn).float())"` prints 1.0,
1.125 and 448: between 1 and 2 e4m3 has eight numbers, and 448 is its largest.
Source:
- Micikevicius et al. 2022, "FP8 Formats for Deep Learning": https://arxiv.org/abs/2209.05433
- torchao's float8 training: https://docs.pytorch.org/ao/stable/workflows/training.html
- Karpathy 2026, nanochat's log: https://github.com/karpathy/nanochat/blob/master/dev/LOG.md
"""

float8 = True
