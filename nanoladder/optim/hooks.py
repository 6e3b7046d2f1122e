"""Hooks around the update of any optimizer: cautious decay, averaged weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanoladder import parallel
from nanoladder.private import lerp_all


def decay_cautiously(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer decay only weights that its update moves towards zero (Chen et al. 2025).

    Takes a copy of the decayed weights during the update.
    """
    for group in optimizer.param_groups:
        group["cautious_decay"], group["weight_decay"] = group["weight_decay"], 0.0
    before = {}

    @torch.no_grad()
    def copy(*_):
        for group in optimizer.param_groups:
            before.update({p: p.clone() for p in group["params"] if group["cautious_decay"] and p.grad is not None})

    @torch.no_grad()
    def decay(*_):
        for group in optimizer.param_groups:
            for p in group["params"] if group["cautious_decay"] else ():
                if (old := before.pop(p, None)) is not None:
                    shrinks = (p - old) * old < 0
                    p.sub_(old * shrinks, alpha=group["lr"] * group["cautious_decay"])

    optimizer.register_step_pre_hook(copy)
    optimizer.register_step_post_hook(decay)


AVERAGE = 0.98  # share of the average that a step keeps: it spans the last 50 steps


def keep_average(optimizer: torch.optim.Optimizer) -> None:
    """Keeps an exponential moving average of the weights in the optimizer's state, as "average"."""

    @torch.no_grad()
    def add(*_):
        weights, averages = [], []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if "average" not in (state := optimizer.state[p]):
                    state["average"] = p.detach().clone()
                weights.append(parallel.local(p.detach()))
                averages.append(parallel.local(state["average"]))
        lerp_all(averages, weights, 1 - AVERAGE)

    optimizer.register_step_post_hook(add)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which the model has the weights that keep_average averages."""
    exchange(optimizer)
    try:
        yield
    finally:
        exchange(optimizer)


@torch.no_grad()
def exchange(optimizer):
    """Exchanges weights and averages."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if "average" in (state := optimizer.state[p]):
                weights = p.clone()
                p.copy_(state["average"])
                state["average"].copy_(weights)
