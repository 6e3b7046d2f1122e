"""Optimizer and random generator state: conversion to the form stored in a file, and back.

In a file, optimizer state is whole, plain tensors and values by parameter name; generator state is one tensor per
device type, with one row per process.
"""

from typing import Any

import torch

from nanoladder import machine, parallel
from nanoladder.optim import BLOCK, state_shapes


def names(model):
    """Returns {parameter: plain name}; a tied weight has one name, on the last stage of a pipeline too."""
    tensors, tied = model.state_dict(keep_vars=True).items(), model.config.tie_embeddings
    return {parameter: parallel.TIED if tied and name == parallel.COPY else name for name, parameter in tensors}


def parameters(optimizer):
    """Lists an optimizer's parameters in the order of their indices in state_dict()."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def plain_state(model, optimizer):
    """Returns the optimizer's state, {parameter name: {state name: value or its parts}}; tensors may be shards."""
    name_of, order = names(model), parameters(optimizer)
    return {
        name_of[order[index]]: {key: plain_parts(value) for key, value in values.items()}
        for index, values in optimizer.state_dict()["state"].items()
    }


def load_optimizer(model, optimizer, state):
    """Loads optimizer state as stored in a file. Hyperparameters keep the config's values.

    An average of the weights that the run no longer keeps is left out: it would be saved again, out of date.
    """
    name_of, numbered = names(model), {}
    for index, parameter in enumerate(parameters(optimizer)):
        name = name_of[parameter]
        kept = state_shapes(model.config, name, parameter.shape)
        values = {key: value for key, value in state.get(name, {}).items() if key in kept}
        if values:
            numbered[index] = {key: from_plain(value, parameter, name) for key, value in values.items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


# -- 8 bits


@torch.no_grad()
def plain_parts(value: Any) -> Any:
    """Returns {codes, scale, qmap, signed} of an 8-bit tensor, sharded as the tensor is; any other value unchanged."""
    local = parallel.local(value)
    if not hasattr(local, "codes"):
        return value
    codes, scale = parallel.as_shards([local.codes, local.scale], value)
    return {"codes": codes, "scale": scale, "qmap": local.qmap, "signed": local.signed}


def from_plain(value, parameter, name):
    """Copies a value of the named parameter's state from its whole, plain form in a file to this process's shard."""
    if not isinstance(value, dict):
        return parallel.local_shard(value, parameter, name)
    machine.require_torchao()
    from torchao.optim.subclass_8bit import OptimState8bit

    qmap, signed = value["qmap"][...].clone(), value["signed"]  # out of the mapped file
    if parallel.local(parameter).numel() % BLOCK:  # a shard boundary falls inside a quantization block
        codes, scale = (value[part][...].clone() for part in ("codes", "scale"))
        return parallel.local_shard(OptimState8bit(codes, scale, qmap, signed).dequantize(), parameter, name)
    codes, scale = (parallel.local_rows(value[part], parameter) for part in ("codes", "scale"))
    return parallel.as_shards([OptimState8bit(codes, scale, qmap, signed)], parameter)[0]


# -- generators


def generators(device):
    """Returns {device type: module} of the random generators in use: the CPU's and the device's."""
    return {"cpu": torch} | ({device.type: torch.get_device_module(device.type)} if device.type != "cpu" else {})


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns {device type: states (processes, bytes) uint8}. Collective."""
    states = {kind: module.get_rng_state() for kind, module in generators(device).items()}
    return {kind: torch.stack(parallel.gather_objects(state)) for kind, state in states.items()}


def check_generators(states, device):
    """Raises RuntimeError if a generator of this process cannot take one of the states."""
    for kind in generators(device).keys() & states:
        for state in states[kind][...]:
            torch.Generator(kind).set_state(state.clone())


def set_generator_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restores this process's generators; a process without a row, or a device without one, keeps its seed."""
    for kind, module in generators(device).items():
        if kind in states and parallel.rank() < len(rows := states[kind][...]):
            module.set_rng_state(rows[parallel.rank()].clone())  # it ignores a view's offset
