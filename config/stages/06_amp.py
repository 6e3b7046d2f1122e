"""Matrix products run in half precision; weights and sums in float32.

What: `torch.autocast` around the forward. auto means bfloat16 if the hardware multiplies it natively, else float16
with a `GradScaler` on CUDA, and elsewhere float32, which changes nothing.
Why: tensor cores (on a CPU: AMX) multiply bfloat16 many times as fast as float32, and activations take half the
memory and half the time to move.
Cost: activations keep 8 bits of mantissa. With float16 the loss is scaled up so that small gradients do not
vanish, and steps whose gradients overflow are skipped.

A small model with a large vocabulary may lose. In an H200's step of the reference model, of width 256, matrix products
fall only from 13.0 to 11.6 ms, as no fast kernel takes 50257 columns before pad_vocab, while the loss, which copies the
logits to float32, rises from 7.1 to 10.5 ms. At the limit, as `--mode=predict --gpu=H200` counts it, amp loses 2 % at
this width, gains 6 % at 384, 13 % at 512 and 23 % at 768, GPT-2's.

Tried: we let a CPU without such instructions emulate bfloat16: 1.3 GFLOP/s, where float32 reaches 123; hence auto.
Try: `python -c "import torch; print(torch.tensor([1.003, 1.005]).bfloat16())"` prints 1.0000 and 1.0078: bfloat16 has
no number between.
Source:
- Micikevicius et al. 2018, "Mixed Precision Training": https://arxiv.org/abs/1710.03740
- Kalamkar et al. 2019, on bfloat16: https://arxiv.org/abs/1905.12322
- torch.amp: https://docs.pytorch.org/docs/stable/amp.html
"""

dtype = "auto"
