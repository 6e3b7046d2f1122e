"""Numbers of 8 bits: each tensor is divided by a scale of its own, which makes its largest number the dtype's largest.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (https://arxiv.org/abs/2209.05433).
"""

import torch

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2  # up to 448; and up to 57,344, as gradients spread wider
SMALLEST = torch.finfo(torch.float32).tiny  # scale of zeros


def to_float8(x: torch.Tensor, dtype: torch.dtype = INPUT) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x / scale, in float8, and the scale (), float32. Numbers that are not finite lead to NaN."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=SMALLEST)
    return (x / scale).to(dtype), scale
