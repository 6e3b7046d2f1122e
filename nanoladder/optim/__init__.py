"""Optimizers other than AdamW, and their choice by name. Not here: AdamW, which train.py builds."""

from nanoladder.optim.build import RELATIVE_LR, build, scale_lr
from nanoladder.optim.in_backward import norm_of_updates, update_in_backward
from nanoladder.optim.skip import may_update

__all__ = [
    "RELATIVE_LR",
    "build",
    "may_update",
    "norm_of_updates",
    "scale_lr",
    "update_in_backward",
]
