"""Weights in int8, a quarter of float32's bytes: each row of a matrix has its own scale, activations keep their dtype.

Generating a token is memory-bound, and int8 means fewer bytes to read if the product takes the weights as they are. A
compiled product of a single row does. Any other product first converts a whole matrix to floats: correct, for a prompt
and for evaluation, but slower than without int8.
"""

from functools import partial

import torch
from torch import nn

from model import GPT
from nanoladder.errors import BadInput
from nanoladder.infer.linear import linears, multiply

LARGEST = 127  # symmetric: -128 is not used


class Rows(nn.Module):
    """An int8 matrix (R, C) with a scale for each row; rounding moves a weight by at most half a scale."""

    def __init__(self, weight):
        super().__init__()
        self.dtype, weight = weight.dtype, weight.detach().float()
        scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST  # (R, 1)
        codes = weight / scales.where(scales > 0, 1)  # a row of zeros, as padding is, has scale 0
        self.register_buffer("codes", codes.round().to(torch.int8))  # (R, C)
        self.register_buffer("scales", scales)

    def forward(self, ids=...):
        """Returns the rows with these ids, or all, in the matrix's original dtype."""
        return (self.codes[ids] * self.scales[ids]).to(self.dtype)


def quantize(gpt: GPT) -> None:
    """Converts the token embedding and the weight of every Linear of a GPT to int8; a tied head shares the embedding's.

    Call it once the model is on its device and in its final dtype. For inference only.
    """
    tied = {}  # weight: Rows
    for module in [gpt.token_embedding, *linears(gpt)]:
        weight = module.weight
        del module.weight
        if weight not in tied:
            tied[weight] = Rows(weight)
        module.rows = tied[weight]
        if module is gpt.token_embedding:
            module.forward = module.rows.forward
        else:
            module.forward = partial(multiply_by_rows, module)


def multiply_by_rows(linear, x):
    """Forward of an int8 Linear. Compiled, for a single row, it converts weights to floats while reading them."""
    return multiply(x, linear.rows(), linear.bias)


def require_gain(device: torch.device, n_rows: int, compile: bool) -> None:
    """Raises BadInput unless int8 is known to be faster than the unquantized weights."""
    if device.type == "mps" or not compile or n_rows > 1:
        raise BadInput(
            "quantize=int8 would be slower here; expected --compile, one prompt and --num_samples=1, on a CPU or a "
            "CUDA GPU; or no --quantize"
        )
