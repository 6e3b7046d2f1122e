"""The residual stream is in half precision; norms compute in float32.

Stands on: cuda_graph
What: one cast, after the embeddings, to autocast's dtype. Sublayers return that dtype already, so from there on the
sums between sublayers, and their gradients, take two bytes a number instead of four. A norm reads them, computes in
float32, and is rounded for the product that follows, as before. In float32 nothing changes.
Why: every norm and every sum reads and writes the stream, forward and backward. In the code that is compiled for an
H100, a step of GPT-2 124M with 32 sequences moves 65 GB instead of 77 (docs/limits.md), and a block keeps less.
Cost: each sum is rounded to 8 bits of mantissa, and so is its gradient; float16 may overflow in a stream that grows.
It is off by default, as it has not been measured on a GPU.
Tried: we counted it without `torch.compile`, where the norms' conversions to float32 are operations of their own: a
block then moves 8 bytes less for each number of the stream, and 40 less compiled.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=H100 --vocab_size=50257 --batch_size=32 --micro_batch_size=0
--stages=cuda_graph,half_residual`: a step is 3 % shorter at the limit, because the stream is half as wide.
Source:
- Jordan et al. 2024, modded-nanogpt, whose tenth record has bfloat16 activations:
  https://github.com/KellerJordan/modded-nanogpt
- Micikevicius et al. 2018, "Mixed Precision Training": https://arxiv.org/abs/1710.03740
"""

half_residual = True
