"""Config keys that fix a model's shape and function."""

import torch
from torch.overrides import TorchFunctionMode

from model import GPT
from nanoladder.config import DEFAULTS, Config, check, typed

# Keys of the second ladder that have their defaults in a GPT-2
RECIPE = ("position", "qk_norm", "activation", "tie_embeddings", "x0_skip", "value_embedding", "key_offset")
RECIPE += ("embedding_norm", "smear", "exclusive_attention")
SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "context_length", *RECIPE)
MODEL = {*SHAPE, "pad_vocab_to", "half_residual"}  # config keys that the model reads


def config_of(state: dict) -> Config:
    """Makes a model's Config from a dict with its "config"; missing keys get their defaults. Raises BadInput."""
    values = DEFAULTS | state["config"]
    config = Config(**{key: typed(key, values[key], "its config") for key in MODEL})
    check(config)
    return config


class WithoutInit(TorchFunctionMode):
    """Skips the functions of torch.nn.init: drawing numbers on the meta device loads the compiler, for 2 seconds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **kwargs or {})


def shapes(config, names):
    """Returns {name: shape} of a model's weights; a tied weight appears once.

    names: the file's, ours or GPT-2's. Raises ValueError, before anything is built, if it has other blocks.
    """
    n_blocks = sum(name.endswith("fc.weight") for name in names)
    if config.n_layer != n_blocks:
        raise ValueError(f"it has {n_blocks:,} blocks, where its config says n_layer={config.n_layer}")
    with torch.device("meta"), WithoutInit():
        return {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
