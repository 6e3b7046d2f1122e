"""Validation of a model's file and of its config."""

import contextlib

from nanoladder.config import DEFAULTS, Config, check, typed
from nanoladder.errors import BadInput

# Config keys that fix what a model computes, and its tensors' shapes. A GPT-2 has the defaults of those of the recipe.
RECIPE = ("position", "qk_norm", "activation", "norm", "tie_embeddings", "logit_softcap", "x0_skip", "value_embedding")
RECIPE += ("key_offset", "embedding_norm", "smear")
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


def config_of(state):
    """Returns the config of a model, with defaults for other keys, of a dict with its "config". Raises BadInput."""
    values = DEFAULTS | state["config"]
    config = Config(**{key: typed(key, values[key], "its config") for key in MODEL})
    check(config)
    return config
