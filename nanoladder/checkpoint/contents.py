"""Checks the contents of a checkpoint against its own config, before any of it is used.

A digest says that a file is as it was written, not that its tensors fit: of another shape or dtype, they crash an
optimizer's kernel, or train another model.
"""

import math

import torch

from nanoladder.checkpoint.shape import config_of, shapes
from nanoladder.checkpoint.slices import Sliced
from nanoladder.config import Config, typed
from nanoladder.optim import BLOCK, state_shapes

FLOAT, BYTE = torch.float32, torch.uint8
PARTS = {"codes", "scale", "qmap", "signed"}  # of a tensor in 8 bits
SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def check_contents(state):
    """Raises ValueError or BadInput, which name the first difference from the config."""
    keys = {key: typed(key, value, "its config") for key, value in state["config"].items()}
    config, weights = Config(**keys), state["model"]
    expected = shapes(config_of(state), weights)
    compare(weights, {name: (shape, FLOAT) for name, shape in expected.items()})
    check_progress(state["progress"], config)
    check_scaler(state["scaler"])
    check_optimizer(state, config, expected)
    compare(state["generators"], dict.fromkeys({"cpu", *state["generators"]}, (None, BYTE)), "generators/")
    for key in ("tokenizer", "data"):
        if not isinstance(state[key], dict):
            raise ValueError(f"its {key} is {state[key]!r:.50}")


def compare(tensors, expected, path=""):
    """Compares tensors, {name: tensor}, with {name: (shape, dtype)}. shape None: a matrix of any size."""
    for name, (shape, dtype) in expected.items():
        tensor = tensors.get(name)
        if not isinstance(tensor, (torch.Tensor, Sliced)):
            raise ValueError(f"it has no tensor {path}{name}")
        if tensor.dtype != dtype or (tensor.dim() != 2 if shape is None else tensor.shape != shape):
            needed = "a matrix" if shape is None else tuple(shape)
            was = f"{plain(tensor.dtype)} {tuple(tensor.shape)}"
            raise ValueError(f"its {path}{name} is {was}, where its config needs {plain(dtype)} {needed}")
    if unknown := tensors.keys() - expected.keys():
        raise ValueError(f"it has {path}{min(unknown)}, which its config does not need")


def plain(dtype):
    return str(dtype).removeprefix("torch.")


def check_progress(progress, config):
    """Checks the counters of a run, and its losses in nats."""
    for key, kind, most in [
        ("step", int, config.max_steps),
        ("best_step", int, progress["step"]),
        ("interval_steps", int, progress["step"]),
        ("interval_loss", float, math.nextafter(math.inf, 0)),
        ("best_val_loss", float, math.inf),  # before the first evaluation
    ]:
        value = progress[key]
        if type(value) is not kind or not 0 <= value <= most:
            raise ValueError(f"its progress has {key}={value!r:.50}; expected {kind.__name__}, from 0 to {most}")


def check_scaler(scaler):
    """Checks the state of a gradient scaler; empty if the run had none."""
    if scaler and scaler.keys() != SCALER:
        raise ValueError(f"its scaler has {sorted(scaler)}; expected {sorted(SCALER)}")
    for key, value in scaler.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf or (key == "scale" and not value):
            raise ValueError(f"its scaler has {key}={value!r:.50}; expected a positive number")


def check_optimizer(state, config, weights):
    """Checks the optimizer's state of all weights, {name: shape}."""
    states = state["optimizer"]
    if state["scaler"] and not any(states.values()):
        return  # until now every step overflowed in float16
    if unknown := states.keys() - weights.keys():
        raise ValueError(f"it has optimizer/{min(unknown)}, which its config does not need")
    for name, shape in weights.items():
        values, path = dict(states.get(name, {})), f"optimizer/{name}/"
        for key in {"exp_avg", "exp_avg_sq"} & values.keys() if config.optimizer == "adamw8bit" else ():
            if isinstance(values[key], dict):
                values[key] = check_8_bits(values[key], shape, f"{path}{key}/")
        compare(values, {key: (shape, FLOAT) for key, shape in state_shapes(config, name, shape).items()}, path)
        if not 1 <= (step := float(values.get("step", 1))) <= state["progress"]["step"] or step % 1:
            raise ValueError(
                f"its {path}step is {step:g}; expected 1 to {state['progress']['step']}, as in its progress"
            )


def check_8_bits(parts, shape, path):
    """Checks the parts of a tensor in 8 bits. Returns a tensor like the whole one, without values."""
    n_blocks, rest = divmod(shape.numel(), BLOCK)
    if rest or parts.keys() != PARTS or parts["signed"] is not path.endswith("exp_avg/"):
        raise ValueError(f"its {path} is not a tensor of {tuple(shape)} in 8 bits")
    expected = {"codes": (shape, BYTE), "scale": ((n_blocks,), FLOAT), "qmap": ((256,), FLOAT)}
    compare({key: parts[key] for key in expected}, expected, path)
    return torch.empty(shape, device="meta")
