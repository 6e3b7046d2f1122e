"""Validation of a checkpoint's config, by itself and against the run's."""

import dataclasses

import torch

from model import GPT
from nanoladder.config import Config, check, typed
from nanoladder.errors import BadInput

SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "context_length")  # config keys that fix tensor shapes
MODEL = {*SHAPE, "pad_vocab_to"}  # config keys that the model reads


class Damaged(BadInput):
    """Raised for a file that is not a complete nanoladder checkpoint."""


def damage(path, error, kind="a checkpoint of nanoladder"):
    """Returns a Damaged exception, of one line, for an error while reading the file."""
    reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Damaged(f"{path} is damaged or not {kind} ({reason})")


def config_of(state):
    """Returns the config of a model, with defaults for other keys, of a dict with its "config". Raises BadInput."""
    if missing := MODEL - state["config"].keys():
        raise BadInput(f"its config has no {' and no '.join(sorted(missing))}")
    config = Config(**{key: typed(key, state["config"][key], "its config") for key in MODEL})
    check(config)
    return config


class Undrawn(GPT):
    """A GPT whose weights are not initialized: to draw numbers on the meta device, PyTorch loads its compiler."""

    def init_weights(self):
        pass


def shapes(config):
    """Yields (name, shape) of every weight in a file. Builds one block on the meta device, which takes no memory."""
    with torch.device("meta"):
        model = Undrawn(dataclasses.replace(config, n_layer=1))
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
