"""The optimizers beyond AdamW."""

import torch

# The learning rate that suits an optimizer, as a multiple of AdamW's.
RELATIVE_LR = {"adamw": 1.0, "sgd": 100.0, "adafactor": 1.0}


def lr_factor(config):
    """What learning_rate and min_lr, which are AdamW's, are multiplied by."""
    return RELATIVE_LR[config.optimizer]


def build(groups, config):
    """The optimizer of that name over groups of parameters, each a dict of params and weight_decay."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1, nesterov=True)
    return torch.optim.Adafactor(groups, lr=config.learning_rate)
