"""Validation of a model's file and of its config."""

import contextlib

from nanoladder.config import DEFAULTS, Config, check, typed
from nanoladder.errors import BadInput

# Config keys that fix what a model computes, and its tensors' shapes. A file without those of the recipe is a GPT-2.
RECIPE = ("position", "qk_norm", "activation", "norm", "tied", "logit_softcap", "embedding_skip", "value_embedding")
SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "context_length", *RECIPE)
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


def keys_of(state):
    """Returns the keys of a model's config, {key: value}, of a dict with its "config", those of the recipe included."""
    return {key: DEFAULTS[key] for key in RECIPE} | state["config"]


def config_of(state):
    """Returns the config of a model, with defaults for other keys, of a dict with its "config". Raises BadInput."""
    values = keys_of(state)
    config = Config(**{key: typed(key, values[key], "its config") for key in MODEL})
    check(config)
    return config
