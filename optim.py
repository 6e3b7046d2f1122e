"""The optimizers beyond AdamW."""

import math

import torch

# The learning rate that suits an optimizer, as a multiple of AdamW's.
RELATIVE_LR = {"adamw": 1.0, "sgd": 100.0, "adafactor": 1.0}


def lr_factor(config):
    """What learning_rate and min_lr, which are AdamW's, are multiplied by."""
    return RELATIVE_LR[config.optimizer]


def batch_factor(config):
    """How lr_scaling multiplies a learning rate that suits batches of lr_reference_batch.

    linear: by the ratio of the batches, for SGD (Goyal et al. 2017); sqrt: by its root, which keeps the noise of a step
    as it was (Krizhevsky 2014), as Adam-like optimizers have to (Malladi et al. 2022).
    """
    if config.lr_scaling == "none":
        return 1.0
    ratio = config.batch_size / config.lr_reference_batch
    return ratio if config.lr_scaling == "linear" else math.sqrt(ratio)


def build(groups, config):
    """The optimizer of that name over groups of parameters, each a dict of params and weight_decay."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1, nesterov=True)
    return torch.optim.Adafactor(groups, lr=config.learning_rate)
