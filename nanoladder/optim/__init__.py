"""Optimizers other than AdamW, and their choice by name. Not here: AdamW, which train.py builds."""

from nanoladder.optim.build import RELATIVE_LR, build
from nanoladder.optim.finite import check_finite
from nanoladder.optim.groups import with_rates
from nanoladder.optim.in_backward import norm_of_updates, update_in_backward
from nanoladder.optim.muon import build_muon
from nanoladder.optim.state import BLOCK, count_state_bytes, state_shapes
