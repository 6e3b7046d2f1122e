"""Config keys that fix a model's shape and what it computes."""

from nanoladder.config import DEFAULTS, Config, check, typed

# Keys of the second ladder that have their defaults in a GPT-2
RECIPE = ("position", "qk_norm", "activation", "norm", "tie_embeddings", "logit_softcap", "x0_skip", "value_embedding")
RECIPE += ("key_offset", "embedding_norm", "smear")
SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "bias", "context_length", *RECIPE)
MODEL = {*SHAPE, "pad_vocab_to"}  # config keys that the model reads


def config_of(state):
    """Makes a model's Config from a dict with its "config"; missing keys get their defaults. Raises BadInput."""
    values = DEFAULTS | state["config"]
    config = Config(**{key: typed(key, values[key], "its config") for key in MODEL})
    check(config)
    return config
