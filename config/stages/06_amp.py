"""Matrix products and what is stored for the backward are in half precision; weights and sums stay float32.

What: `torch.autocast` around the forward. auto is bfloat16 where the hardware multiplies it, float16 with a
`GradScaler` on GPUs that have only that, and float32 elsewhere: there nothing changes.
Why: tensor cores (AMX on a CPU) multiply bfloat16 many times faster than float32, and activations take half the
memory and half the time to move.
Cost: 8 bits of mantissa in activations; float16 needs its gradients scaled up, lest they vanish, and skips the
steps in which they overflow.
Source:
- Micikevicius et al. 2018, "Mixed Precision Training": https://arxiv.org/abs/1710.03740
- Kalamkar et al. 2019, on bfloat16: https://arxiv.org/abs/1905.12322
- torch.amp: https://docs.pytorch.org/docs/stable/amp.html
"""

dtype = "auto"
