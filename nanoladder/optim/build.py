"""Optimizers by name: PyTorch's and this package's."""

import torch

from nanoladder import machine
from nanoladder.optim import lion
from nanoladder.optim.galore import GaLore

BETA1 = 0.9  # decay rate of the mean gradient, as AdamW's in train.py
FIRST_MOMENTUM, MOMENTUM_WARMUP = 0.85, 300  # Muon's at the start, and the steps until it is 0.95
# Good learning rate of each optimizer as a multiple of AdamW's: from its paper if stated there, else from
# `profile.py --train`, whose table in results/ shows a lower and a higher one as well.
RELATIVE_LR = {
    "sgd": 100.0,
    "adafactor": 30.0,  # Adafactor multiplies by a matrix's RMS, about 0.02
    "muon": 2.0,  # Liu et al. 2025 scale updates to suit 1; over 0.6 million tokens, 6 is better
    "lion": 0.3,  # Chen et al. 2023 use 0.1 to 0.3
    "galore": 1.0,  # with galore.SCALE; over 0.6 million tokens, 3 is better
}


def scale_lr(lr, config):
    """Converts AdamW's learning rate to that of the config's optimizer."""
    return lr * RELATIVE_LR.get(config.optimizer, 1.0)


def build(groups, model, config):
    """Builds the optimizer named by the config. groups: parameter groups, the decayed matrices first.

    Weight decay is rescaled so that a step shrinks the weights as much as AdamW would, at any relative learning rate.
    """
    if config.optimizer == "adamw8bit":
        return adamw8bit(groups, config)
    factor = RELATIVE_LR.get(config.optimizer, 1.0)
    groups = [{**group, "weight_decay": group["weight_decay"] / factor} for group in groups]
    device = groups[0]["params"][0].device
    if config.optimizer == "sgd":
        for group in groups:
            group["weight_decay"] *= 1 - BETA1  # momentum accumulates the decay too
        # foreach=False, here and below, keeps only one update in memory at a time
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=BETA1, nesterov=True, foreach=False)
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.learning_rate, foreach=False)
    if config.optimizer == "lion":
        return lion.Lion(groups, config.learning_rate, (BETA1, lion.BETA2))
    hidden, rest = hidden_and_rest(groups, model.blocks)
    betas = BETA1, config.beta2
    if config.optimizer == "muon":
        # Updates of AdamW's usual size (Liu et al. 2025), so that both optimizers share a learning rate
        kind = torch.optim.Muon if machine.choose_dtype(config.dtype, device) == torch.bfloat16 else Float32Muon
        first = kind(hidden, lr=config.learning_rate, adjust_lr_fn="match_rms_adamw")
        first.register_step_pre_hook(warm_up_momentum)
    else:
        first = GaLore(hidden, config.learning_rate, betas)
    implementation = {name: config.adamw_impl == name for name in ("foreach", "fused")}
    return Combined(first, torch.optim.AdamW(rest, lr=config.learning_rate, betas=betas, **implementation))


def adamw8bit(groups, config):
    """Builds AdamW with both moments quantized to 8 bits in blocks of 256 (Dettmers et al. 2022).

    groups: list of parameter groups. Raises BadInput if torchao is not installed.
    """
    machine.require_torchao()
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(groups, lr=config.learning_rate, betas=(BETA1, config.beta2))
    optimizer.register_step_pre_hook(lr_to_tensor)
    if not config.compile:  # torchao compiles its update
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def lr_to_tensor(optimizer, *_):
    """Converts the learning rate to a tensor, because a compiled update would treat a float as a constant."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


def warm_up_momentum(muon, *_):
    """Raises Muon's momentum to its usual 0.95 over the first MOMENTUM_WARMUP steps, as modded-nanogpt does.

    Gradients change fast at first, and an average over many of them is out of date.
    """
    for group in muon.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                step = muon.state[parameter].setdefault("step", torch.tensor(0.0)).add_(1)  # on the CPU, as AdamW's
                missing = max(0.0, 1 - step.item() / MOMENTUM_WARMUP) * (muon.defaults["momentum"] - FIRST_MOMENTUM)
                group["momentum"] = muon.defaults["momentum"] - missing


class Float32Muon(torch.optim.Muon):
    """Muon with float32 matrix products: for dtype=float32, and where bfloat16 is emulated, a hundred times slower."""

    def step(self, closure=None):
        bfloat16, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, torch.Tensor.clone
        try:
            return super().step(closure)
        finally:
            torch.Tensor.bfloat16 = bfloat16


def hidden_and_rest(groups, blocks):
    """Splits the parameter groups into two lists: matrices inside the blocks, and all other parameters."""
    inside = set(blocks.parameters())
    decayed, *others = groups
    hidden = [parameter for parameter in decayed["params"] if parameter in inside]
    outside = [parameter for parameter in decayed["params"] if parameter not in inside]
    return [{**decayed, "params": hidden}], [{**decayed, "params": outside}, *others]


class Combined(torch.optim.Optimizer):
    """Several optimizers combined into one; each updates its own parameter groups."""

    def __init__(self, *optimizers):
        for number, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                group["by"] = number
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers

    def step(self):
        for number, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = [group for group in self.param_groups if group["by"] == number]
            optimizer.state = self.state
            optimizer.step()
