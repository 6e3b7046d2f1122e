"""Precision: the dtype of matrix products, autocast, gradient scaling for float16, and 8-bit libraries."""

import importlib
import importlib.util
import logging
import warnings

import torch

from nanoladder.errors import BadInput

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
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16():
    """True if this CPU has instructions for bfloat16 that oneDNN may use, which ONEDNN_MAX_CPU_ISA can forbid."""
    return torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def double(tensor):
    """Converts a tensor to float64, in which sums lose nothing; to float32 on mps, which has no float64."""
    return tensor.to(torch.float32 if tensor.device.type in WITHOUT_FLOAT64 else torch.float64)


def autocast(model, name, device):
    """Makes the model's forward run matrix products in the chosen dtype. Returns the model, unchanged for float32.

    Of a pipeline, the forward of each part.
    """
    dtype = choose_dtype(name, device)
    if dtype != torch.float32:
        for part in getattr(model, "parts", [model]):
            part.forward = torch.autocast(device.type, dtype=dtype)(part.forward)
    return model


def gradient_scaler(name, device):
    """Returns a GradScaler, which keeps small float16 gradients from underflowing and skips steps that overflow.

    For any other dtype the scaler is disabled: its methods are no-ops.
    """
    return torch.amp.GradScaler(device.type, enabled=choose_dtype(name, device) == torch.float16)


def eight_bit_library(device):
    """Returns the installed library of 8-bit optimizers, torchao or bitsandbytes. Raises BadInput if there is none."""
    logging.disable(logging.WARNING)  # torchao warns about kernels that this machine lacks
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash")  # compiles anyway
    try:
        importlib.import_module("torchao.optim")
    except ImportError:
        if device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
            return "bitsandbytes"
        raise BadInput(
            "optimizer=adamw8bit needs torchao; install it: python -m pip install torchao, or use --optimizer=adamw"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return "torchao"
