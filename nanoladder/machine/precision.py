"""The dtypes of this machine: what matrix products are computed in, autocast, and the scaling that float16 needs."""

import importlib
import importlib.util
import logging
import warnings

import torch

from nanoladder.errors import BadInput


def choose_dtype(name, device):
    """The dtype of matrix products. auto: bfloat16 if it is native, else float16 on a GPU and float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def autocast(model, name, device):
    """The model with a forward that computes its matrix products in the chosen dtype; in float32 as it is."""
    dtype = choose_dtype(name, device)
    if dtype != torch.float32:
        model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)
    return model


def gradient_scaler(name, device):
    """Scales the loss so that small float16 gradients do not vanish, and skips steps that overflow.

    In any other dtype the scaler is disabled: its methods pass everything through.
    """
    return torch.amp.GradScaler(device.type, enabled=choose_dtype(name, device) == torch.float16)


def eight_bit_library(device):
    """The package that implements 8-bit optimizers here, torchao or bitsandbytes. Raises BadInput if none is."""
    logging.disable(logging.WARNING)  # torchao lists the kernels that this machine lacks
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash")  # it compiles all the same
    try:
        importlib.import_module("torchao.optim")
    except ImportError:
        if device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
            return "bitsandbytes"
        raise BadInput(
            "optimizer=adamw8bit needs torchao; install it: python -m pip install torchao, or go without: "
            "--optimizer=adamw"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return "torchao"
