"""Precision: the dtype of matrix products, sums in float64, and the 8-bit library."""

import importlib
import logging
import warnings

import torch

from nanoladder.errors import BadInput
from nanoladder.private import multiplies_bfloat16

WITHOUT_FLOAT64 = ("mps",)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
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


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to float64, in which sums lose nothing; to float32 on mps, which has no float64."""
    return tensor.to(torch.float32 if tensor.device.type in WITHOUT_FLOAT64 else torch.float64)


def require_torchao() -> None:
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
