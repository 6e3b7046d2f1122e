"""The vocabulary is padded to a multiple of 64, so that rows align.

What: 50257 tokens become 50304 rows of the embedding and the head. A bias of -∞ keeps the probability of the padded
rows at zero: they get no gradient, stay zero, and are never sampled.
Why: tensor cores read rows in aligned pieces; with an odd number of columns cuBLAS falls back to a slower kernel.
Cost: 47 rows. A vocabulary that is already a multiple of 64, such as the 256 bytes, stays as it is.
Tried: we measured it with the 256 bytes as vocabulary; nothing is padded there, and nothing changed.
Try: `python train.py config/recipe_small.py --compile=False --max_steps=20 --eval_windows=16 --pad_vocab_to=1000
--out_dir=out/padded` pads 4,096 rows to 5,000: the losses are those without padding.
Source:
- Karpathy 2023, on nanoGPT ("the most dramatic optimization"): https://x.com/karpathy/status/1621578354024677377
- NVIDIA's guide to matrix multiplication:
  https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
"""

pad_vocab_to = 64
