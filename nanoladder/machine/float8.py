"""Linear layers that multiply in float8, and the devices that can."""

import torch
from torch import nn

from operators.float8 import GRADIENT, to_float8
from operators.private import scaled_mm

HOPPER = 9, 0  # compute capability
Scaled = tuple[torch.Tensor, torch.Tensor]  # float8 numbers and their scale, from to_float8


def float8_obstacle(device: torch.device) -> str:
    """Returns the reason why a device cannot multiply in float8; an empty string if it can. A CPU emulates it."""
    if device.type == "cpu":
        return ""
    if device.type == "mps" or torch.version.hip:
        return f"it has not been tried on {'mps' if device.type == 'mps' else 'ROCm'}"
    if (capability := torch.cuda.get_device_capability(device)) < HOPPER:
        this_one = ".".join(map(str, capability))
        return f"it needs a GPU from Hopper on (compute capability 9.0), and this one has {this_one}"
    return ""


def use_float8(blocks: nn.Module) -> None:
    """Makes all Linears of the blocks multiply in float8, in place: their parameters stay the same."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear


class Float8Linear(nn.Linear):
    """A Linear whose products are in float8. Widths, and the tokens of an input, are multiples of 16."""

    def forward(self, x):
        device = x.device.type
        x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        y = Float8Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Float8Product(torch.autograd.Function):
    """x (N, C) times weight (R, C) -> (N, R), in the dtype of x; all three products are in float8."""

    @staticmethod
    def forward(ctx, x, weight):
        x8 = to_float8(x)
        ctx.save_for_backward(*x8, weight)  # as it is: a sharded one is freed in between
        return multiply_rows(x8, to_float8(weight), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy):
        x8, x_scale, weight = ctx.saved_tensors
        dy8, dy_scale = to_float8(dy, GRADIENT)
        weight8, weight_scale = to_float8(weight)
        dx = multiply_rows((dy8, dy_scale), (weight8.t().contiguous(), weight_scale), dy.dtype)
        d_weight = multiply_rows((dy8.t().contiguous(), dy_scale), (x8.t().contiguous(), x_scale), weight.dtype)
        return dx, d_weight


def multiply_rows(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """Products (N, R) of the rows of left (N, C) with those of right (R, C), as Hopper's tensor cores read them.

    fast: sums of fewer bits within a tensor core, as is usual in a forward.
    """
    (a, a_scale), (b, b_scale) = left, right
    return scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
