"""Parameter groups: separate learning rates, and AdamW beside an optimizer that updates only the blocks' matrices."""

import torch

from nanoladder.config import Config


def with_rates(groups: list[dict], model: torch.nn.Module, config: Config) -> list[dict]:
    """Moves tables of token embeddings, an untied head and scalars into groups of their own, with their learning rates.

    groups: the decayed matrices, then the rest. Every parameter stays in exactly one group; these three have no decay.
    """
    rates = {}
    for name, parameter in model.named_parameters():
        if "token_embedding" in name or "value_embeddings" in name:
            rates[parameter] = config.embedding_lr
        elif name.endswith("head.weight"):
            rates[parameter] = config.head_lr
        elif name.endswith(("lambdas", "smear")):
            rates[parameter] = config.scalar_lr
    rest = [{**group, "params": [p for p in group["params"] if p not in rates]} for group in groups]
    separate = [
        {"params": [p for p in rates if rates[p] == rate], "weight_decay": 0.0, "lr_factor": rate}
        for rate in sorted(set(rates.values()))
    ]
    return [*rest, *separate]


def hidden_and_rest(groups, model):
    """Splits parameter groups, the decayed matrices first, into two lists: matrices inside the blocks, and the rest."""
    inside = set(model.blocks.parameters())
    decayed, *others = groups
    hidden = [parameter for parameter in decayed["params"] if parameter in inside]
    outside = [parameter for parameter in decayed["params"] if parameter not in inside]
    return [{**decayed, "params": hidden}], [{**decayed, "params": outside}, *others]


class WithAdamW(torch.optim.Optimizer):
    """An optimizer for some parameter groups and AdamW for the rest, as one optimizer."""

    def __init__(self, first, rest, config):
        implementation = {"foreach": False, "fused": config.adamw_impl == "fused"}
        betas = config.beta1, config.beta2
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
