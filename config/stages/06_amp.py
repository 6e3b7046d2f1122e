"""Matrix products run in half precision; weights and sums in float32.

What: `torch.autocast` around the forward. auto means bfloat16 if the hardware multiplies it natively, else float16
with a `GradScaler` on CUDA, and elsewhere float32, which changes nothing.
Why: tensor cores (on a CPU: AMX) multiply bfloat16 many times as fast as float32, and activations take half the
memory and half the time to move.
Cost: activations keep 8 bits of mantissa. With float16 the loss is scaled up so that small gradients do not
vanish, and steps whose gradients overflow are skipped.
Tried: we let a CPU without such instructions emulate bfloat16: 1.3 GFLOP/s, where float32 reaches 123; hence auto.
Source:
- Micikevicius et al. 2018, "Mixed Precision Training": https://arxiv.org/abs/1710.03740
- Kalamkar et al. 2019, on bfloat16: https://arxiv.org/abs/1905.12322
- torch.amp: https://docs.pytorch.org/docs/stable/amp.html
"""

dtype = "auto"
