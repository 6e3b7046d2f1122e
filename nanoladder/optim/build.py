"""Optimizers by name: PyTorch's and this package's, except AdamW and Muon, which train.py names."""

import torch

from nanoladder import machine
from nanoladder.config import Config
from nanoladder.optim.galore import GaLore
from nanoladder.optim.groups import WithAdamW, hidden_and_rest
from nanoladder.optim.lion import Lion

# Good learning rate of an optimizer as a multiple of AdamW's: from its paper if stated there, else from
# `profile.py --train`, whose table in results/ shows a lower and a higher one as well. Muon (Liu et al. 2025) and
# GaLore take AdamW's; over 0.6 million tokens, 6 and 3 times as much are better.
RELATIVE_LR = {
    "sgd": 100.0,
    "adafactor": 30.0,  # Adafactor multiplies by a matrix's RMS, about 0.02
    "lion": 0.3,  # Chen et al. 2023 use 0.1 to 0.3
}
MOMENTUM = 0.9  # of SGD


def build(groups: list[dict], model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Builds the optimizer named by the config. groups: parameter groups, the decayed matrices first."""
    if config.optimizer == "adamw8bit":
        return adamw8bit(groups, config)
    if config.optimizer == "galore":
        hidden, rest = hidden_and_rest(groups, model)
        galore = GaLore(hidden, config.learning_rate, (config.beta1, config.beta2))
        return WithAdamW(galore, rest, config)
    groups = scale_lr(groups, config)
    if config.optimizer == "lion":
        return Lion(groups, config.learning_rate)
    if config.optimizer == "adafactor":  # foreach=False, here and below, keeps only one update in memory at a time
        return torch.optim.Adafactor(groups, lr=config.learning_rate, foreach=False)
    for group in groups:
        group["weight_decay"] *= 1 - MOMENTUM  # momentum accumulates the decay too
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=MOMENTUM, nesterov=True, foreach=False)


def scale_lr(groups, config):
    """Gives parameter groups the learning rate that suits the config's optimizer, as a multiple of AdamW's: lr_factor.

    Weight decay is divided by it, so that a step shrinks the weights as much as AdamW would.
    """
    factor = RELATIVE_LR[config.optimizer]
    return [
        {**group, "lr_factor": factor * group.get("lr_factor", 1.0), "weight_decay": group["weight_decay"] / factor}
        for group in groups
    ]


def adamw8bit(groups, config):
    """Builds AdamW with both moments quantized to 8 bits in blocks of 256 (Dettmers et al. 2022).

    groups: list of parameter groups. Raises BadInput if torchao is not installed.
    """
    machine.require_torchao()
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    optimizer.register_step_pre_hook(lr_to_tensor)
    if not config.compile:  # torchao compiles its update
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def lr_to_tensor(optimizer, *_):
    """Converts the learning rate to a tensor, because a compiled update would treat a float as a constant."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
