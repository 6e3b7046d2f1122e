"""Validation of a model's file, of its config by itself, and of both against the run's."""

import contextlib

from nanoladder.config import Config, check, typed
from nanoladder.errors import BadInput

SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "context_length")  # config keys that fix tensor shapes
MODEL = {*SHAPE, "pad_vocab_to"}  # config keys that the model reads


class Damaged(BadInput):
    """Raised for a file that is not a complete nanoladder checkpoint, or not a complete model of another format."""


@contextlib.contextmanager
def reading(path, kind="a checkpoint of nanoladder"):
    """Turns whatever fails while a file is read, as a damaged one does in many ways, into Damaged, of one line."""
    try:
        yield
    except Exception as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise Damaged(f"{path} is damaged or not {kind} ({reason.splitlines()[0]:.300})") from None


def config_of(state):
    """Returns the config of a model, with defaults for other keys, of a dict with its "config". Raises BadInput."""
    config = Config(**{key: typed(key, state["config"][key], "its config") for key in MODEL})
    check(config)
    return config


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
