"""CUDA graphs: the kernels of a step, captured once, then launched by one call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanoladder.config import Config
from nanoladder.private import clear_workspaces


def capture_obstacle(config: Config, device: torch.device) -> str:
    """Returns the reason why a CUDA graph cannot capture a step's forward and backward; an empty string if it can."""
    if device.type != "cuda":
        return device.type.upper()
    if torch.distributed.is_initialized():
        return "processes exchange messages during a step"
    if config.optimizer_in_backward:
        return "optimizer_in_backward updates the weights during it"
    if config.sampled_softmax:
        return "sampled_softmax has as many logits as a batch needs"
    if config.activation_checkpointing != "none" and (not config.compile or config.compiles_blocks):
        return "recomputation reads the random generator's state, unless it is compiled with the model"
    return ""


def can_capture(config: Config, device: torch.device) -> bool:
    """True if a CUDA graph can capture a step's forward and backward."""
    return not capture_obstacle(config, device)


def replay(
    function: Callable[..., torch.Tensor],
    model: Any,
    scaler: torch.amp.GradScaler,
    batch: tuple,
    config: Config,
) -> torch.Tensor:
    """Calls function(model, scaler, batch, config) by replaying the CUDA graph of its second call.

    function: leaves gradients in the model's parameters, and returns a tensor. Every batch has the shape of the first.
    The first call compiles, and allocates the memory that outlives a step. The graph's gradients and activations have
    their own memory (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
    """
    if not hasattr(model, "captured"):
        model.captured = CapturedStep(function, model, scaler, batch, config)
    return model.captured(batch)


class CapturedStep:
    """Calls function(model, scaler, batch, config) for one batch after another, each copied to the same memory."""

    def __init__(self, function, model, scaler, batch, config):
        self.batch = type(batch)(*(torch.empty_like(tensor) for tensor in batch))
        self.parameters, self.graph, self.calls = list(model.parameters()), None, 0
        self.function = partial(function, model, scaler, self.batch, config)

    def __call__(self, batch):
        for static, value in zip(self.batch, batch, strict=True):
            static.copy_(value, non_blocking=True)
        self.calls += 1
        if self.calls == 1:
            return self.function()
        if self.calls == 2:
            self.capture()
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.result.clone()  # the next replay overwrites it

    def capture(self):
        for parameter in self.parameters:
            parameter.grad = None  # so that the backward allocates it in the graph's memory, instead of adding to it
        clear_workspaces()  # of the first call: the graph has its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # the loader's thread may use CUDA
            self.result = self.function()
        self.gradients = [parameter.grad for parameter in self.parameters]
