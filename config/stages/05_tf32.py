"""float32 matrix products run on tensor cores, their inputs rounded to TF32.

What: `torch.set_float32_matmul_precision("high")`: 10 bits of mantissa instead of 23 in a product's inputs,
sums still in float32.
Why: from Ampere on, tensor cores multiply TF32 several times faster than the other units multiply float32.
Cost: products are exact to about three digits. Older GPUs and CPUs have no TF32: nothing changes there. With
bfloat16 on, little is left that TF32 could speed up.
Source:
- torch.set_float32_matmul_precision: https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
- NVIDIA's A100 white paper (2020):
  https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
"""

matmul_precision = "high"
