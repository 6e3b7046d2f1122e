"""Parameter groups: their learning rates, and two optimizers for them."""

import torch

BETA1 = 0.9  # decay rate of the mean gradient, as AdamW's in train.py
# Good learning rate of each optimizer as a multiple of AdamW's: from its paper if stated there, else from
# `profile.py --train`, whose table in results/ shows a lower and a higher one as well.
RELATIVE_LR = {
    "sgd": 100.0,
    "adafactor": 30.0,  # Adafactor multiplies by a matrix's RMS, about 0.02
    "muon": 2.0,  # Liu et al. 2025 scale updates to suit 1; over 0.6 million tokens, 6 is better
    "lion": 0.3,  # Chen et al. 2023 use 0.1 to 0.3
    "galore": 1.0,  # with galore.SCALE; over 0.6 million tokens, 3 is better
}


def scale_lr(groups, config):
    """Gives parameter groups the learning rate that suits the config's optimizer, as a multiple of AdamW's: lr_factor.

    Weight decay is divided by it, so that a step shrinks the weights as much as AdamW would.
    """
    factor = RELATIVE_LR[config.optimizer]
    return [
        {**group, "lr_factor": factor * group.get("lr_factor", 1.0), "weight_decay": group["weight_decay"] / factor}
        for group in groups
    ]


def hidden_and_rest(groups, model):
    """Splits parameter groups, the decayed matrices first, into two lists: matrices inside the blocks, and the rest."""
    inside = set(model.blocks.parameters())
    decayed, *others = groups
    hidden = [parameter for parameter in decayed["params"] if parameter in inside]
    outside = [parameter for parameter in decayed["params"] if parameter not in inside]
    return [{**decayed, "params": hidden}], [{**decayed, "params": outside}, *others]


class WithAdamW(torch.optim.Optimizer):
    """An optimizer for some parameter groups and AdamW, at its own learning rate, for the rest; one to the outside."""

    def __init__(self, first, rest, config):
        implementation = {name: config.adamw_impl == name for name in ("foreach", "fused")}
        betas = BETA1, config.beta2
        self.optimizers = [first, torch.optim.AdamW(rest, lr=config.learning_rate, betas=betas, **implementation)]
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                group["by"] = number
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})

    def step(self):
        for number, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = [group for group in self.param_groups if group["by"] == number]
            optimizer.state = self.state
            optimizer.step()
