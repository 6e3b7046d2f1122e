"""Precision: the dtype of matrix products, autocast, gradient scaling for float16, and the 8-bit library."""

import importlib
import logging
import warnings

import torch

from nanoladder.errors import BadInput
from operators.private import multiplies_bfloat16, scale_of

WITHOUT_FLOAT64 = ("mps",)


def choose_dtype(name, device):
    """Returns the dtype of matrix products. "auto": bfloat16 if native, else float16 on CUDA and float32 elsewhere.

    Apple's GPUs compute float16 at the rate of float32, and M1 and M2 emulate bfloat16: on mps "auto" is float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "mps":
        return torch.float32
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def double(tensor):
    """Converts a tensor to float64, in which sums lose nothing; to float32 on mps, which has no float64."""
    return tensor.to(torch.float32 if tensor.device.type in WITHOUT_FLOAT64 else torch.float64)


def autocast(model, name, device):
    """Makes the model's forward run matrix products in the chosen dtype. Returns the model.

    For float16 the backward starts from a scaled loss, so that small gradients do not underflow; unscale_gradients
    undoes it.
    """
    dtype = choose_dtype(name, device)
    model.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    for part in getattr(model, "parts", [model]):  # of a pipeline
        if dtype != torch.float32:
            part.forward = torch.autocast(device.type, dtype=dtype)(part.forward)
        if dtype == torch.float16:
            part.forward = scale_backward(part.forward, model.scaler, device)
    return model


def scale_backward(forward, scaler, device):
    """The forward, with a loss of the same value whose gradient is multiplied by the scaler's scale.

    Without gradients, in evaluation, it is the forward itself, whatever that returns.
    """
    scaler.scale(torch.zeros((), device=device))  # makes the tensor of the scale, which is updated in place
    scale = scale_of(scaler)

    def scaled(*inputs):
        loss = forward(*inputs)
        if not torch.is_grad_enabled():
            return loss
        larger = loss * scale
        return loss.detach() + (larger - larger.detach())  # the loss plus 0

    return scaled


def scaler_of(model):
    """The GradScaler that autocast gave the model; a disabled one if nobody called it."""
    return getattr(model, "scaler", torch.amp.GradScaler(enabled=False))


def unscale_gradients(model, optimizer):
    """Unscales float16's gradients in place, and updates the scale. An overflow makes the norm infinite.

    Nothing to do for another dtype, whose scaler is disabled.
    """
    model.scaler.unscale_(optimizer)
    model.scaler.update()
    optimizer.overflows = model.scaler.is_enabled()


def require_torchao():
    """Imports torchao, with its 8-bit optimizers, without its warnings. Raises BadInput if it is not installed."""
    logging.disable(logging.WARNING)  # it warns about kernels that this machine lacks
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash")  # compiles anyway
    try:
        importlib.import_module("torchao.optim")
    except ImportError:
        raise BadInput(
            "optimizer=adamw8bit needs torchao; install it: python -m pip install torchao, or use --optimizer=adamw"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
