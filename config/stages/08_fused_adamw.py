"""AdamW updates all parameters in one kernel instead of a dozen small ones for each.

What: `AdamW(fused=True)`. Between the two lies foreach: one kernel for each operation, over all parameters.
Why: the loop launches about twelve kernels a tensor, and each reads and writes memory again; fused reads and
writes weight, gradient and both averages once.
Cost: none; roundings differ in the last bit.
Source:
- Loshchilov & Hutter 2019, on AdamW: https://arxiv.org/abs/1711.05101
- torch.optim.AdamW, "fused": https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
"""

adamw_impl = "fused"
