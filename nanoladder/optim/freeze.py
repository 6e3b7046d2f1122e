"""Freezing: weights that fine-tuning leaves as they are."""

from nanoladder.config import count_frozen_blocks


def freeze(model, config):
    """Freezes the weights that config.freeze names: the embeddings, and with blocks:K the lower K blocks as well.

    A frozen weight has no gradient, so no optimizer updates it, decays it or keeps a state for it. The head is frozen
    with the token embedding, to which it is tied. Nothing is computed backwards below the lowest weight that learns.
    """
    if config.freeze != "none":
        blocks = model.blocks[: count_frozen_blocks(config)]
        for module in (model.token_embedding, model.position_embedding, *blocks):
            module.requires_grad_(False)


def count_frozen(model):
    """Number of parameters that do not learn, without the vocabulary's padding. Those that learn have none."""
    return model.n_params - sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
