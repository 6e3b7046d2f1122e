"""CUDA graphs: the kernels of a step, recorded once, then launched by one call."""

import torch

from nanoladder.private import clear_workspaces


def why_not_recorded(config, device):
    """Returns why a step's forward and backward cannot be recorded as a CUDA graph; an empty string if they can."""
    if device.type != "cuda":
        return f"{device.type} has none"
    if torch.distributed.is_initialized():
        return "processes exchange messages during a step"
    if config.optimizer_in_backward:
        return "optimizer_in_backward updates the weights during it"
    if config.checkpointing != "none" and (not config.compile or config.compiles_blocks):
        return "recomputation reads the random generator's state, unless it is compiled with the model"
    return ""


def can_record(config, device):
    """True if a step's forward and backward can be recorded as a CUDA graph."""
    return not why_not_recorded(config, device)


def replay(function, model, batch, config):
    """Calls function(model, batch, config) in the kernels of its second call, which are recorded as a CUDA graph.

    function: leaves gradients in the model's parameters, and returns a tensor. Every batch has the shape of the first.
    The first call compiles and allocates what outlives a step. The graph reads its batch and writes its gradients and
    activations in memory of its own (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
    """
    if not hasattr(model, "graph"):
        model.graph = None
        return function(model, batch, config)
    if model.graph is None:
        model.graph = Graph(function, model, batch, config)
    return model.graph.replay(batch)


class Graph:
    """A recorded call of function(model, batch, config)."""

    def __init__(self, function, model, batch, config):
        self.batch = type(batch)(*(tensor.clone() for tensor in batch))
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            parameter.grad = None  # so that the backward allocates it in the graph's memory, instead of adding to it
        clear_workspaces()  # of the first call: the graph has its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # the loader's thread may use CUDA
            self.result = function(model, self.batch, config)
        self.gradients = [parameter.grad for parameter in self.parameters]

    def replay(self, batch):
        for own, new in zip(self.batch, batch, strict=True):
            own.copy_(new, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.result.clone()  # the next replay overwrites it
