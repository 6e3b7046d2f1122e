"""Validation of a checkpoint against its own config, and of its config against the run's."""

import dataclasses
from unittest.mock import patch

import torch

from model import GPT
from nanoladder.config import DEFAULTS, RETIRED, Config, check, typed
from nanoladder.errors import BadInput

PROGRESS = {"step": int, "best_val_loss": float, "interval_loss": float, "interval_steps": int}
SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "context_length")  # config keys that fix tensor shapes
MODEL = {*SHAPE, "pad_vocab_to"}  # config keys that the model reads


class Damaged(BadInput):
    """Raised for a file that is not a complete nanoladder checkpoint."""


def damage(path, error, kind="a checkpoint of nanoladder"):
    """Returns a Damaged exception, of one line, for an error while reading the file."""
    reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Damaged(f"{path} is damaged or not {kind} ({reason})")


def check_contents(state):
    """Raises ValueError or BadInput unless a checkpoint's progress is complete and its weights match its config."""
    progress, weights, names = state["progress"], state["model"], set()
    for key, kind in PROGRESS.items():
        if type(progress.get(key)) is not kind:
            raise ValueError(f"its progress has no {key}")
    if progress["step"] < 1 or progress["interval_steps"] < 0:
        raise ValueError("its progress is before the first step")
    if any(type(text) is not str for text in state["tokenizer"].values()):
        raise ValueError("its tokenizer has no digest")
    for name, shape in shapes(config_of(state)):
        tensor = weights.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32:
            raise ValueError(f"its {name} is not float32 {tuple(shape)}, as its config requires")
        names.add(name)
    if unknown := weights.keys() - names:
        raise ValueError(f"it has weights that its config's model does not have, such as {min(unknown)}")


def config_of(state):
    """Returns the config of a checkpoint's model, with defaults for other keys. Raises ValueError or BadInput."""
    values = state["config"]
    if values.keys() - DEFAULTS.keys() - RETIRED.keys():
        raise ValueError("its config has keys that this version does not know")
    for key, value in values.items():
        if type(value) not in (bool, int, float, str) or len(str(value)) > 4096:
            raise ValueError(f"its config's {key} is not a valid value")
        if key in DEFAULTS:
            typed(key, value, "its config")
    if missing := MODEL - values.keys():
        raise ValueError(f"its config has no {' and no '.join(sorted(missing))}")
    config = Config(**{key: values[key] for key in MODEL})
    check(config)
    return config


def shapes(config):
    """Yields (name, shape) of every weight in a file. Builds one block on the meta device, which takes no memory."""
    drawing = patch.object(torch.nn.init, "normal_")  # of tensors without numbers: PyTorch loads its compiler for it
    with torch.device("meta"), drawing:
        model = GPT(dataclasses.replace(config, n_layer=1))
    for name, parameter in model.named_parameters():  # a tied weight once
        for n in range(config.n_layer) if name.startswith("blocks.0.") else [0]:
            yield name.replace("blocks.0.", f"blocks.{n}."), parameter.shape


def check_shape(ours, theirs, path):
    """Raises BadInput unless weights of a model with config `theirs` fit one with config `ours`; names the keys to set.

    A shorter context_length fits.
    """
    wrong = [key for key in SHAPE if getattr(ours, key) != theirs[key]]
    if ours.context_length < theirs["context_length"]:
        wrong.remove("context_length")
    if wrong:
        found = " ".join(f"{key}={getattr(ours, key)}" for key in wrong)
        flags = " ".join(f"--{key}={theirs[key]}" for key in wrong)
        raise BadInput(f"the config has {found}, unlike the model of {path}; expected {flags}")


def check_like(ours, theirs, where):
    """Raises ValueError unless two trees have the same keys, types, shapes and dtypes."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict) or ours.keys() != theirs.keys():
            raise ValueError(f"its {where} has other entries than this run's")
        for key in ours:
            check_like(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(ours, torch.Tensor):
        if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ValueError(f"its {where} is not a tensor of {ours.dtype} {tuple(ours.shape)}, as this run's is")
    elif type(ours) is not type(theirs):
        raise ValueError(f"its {where} is not of type {type(ours).__name__}")
