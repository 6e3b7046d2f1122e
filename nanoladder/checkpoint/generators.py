"""States of the random generators as tensors, one row per process."""

import torch

from nanoladder import parallel


def generators(device):
    """The modules of the generators in use, {device type: module}: the CPU's, and the device's own."""
    return {"cpu": torch} | ({device.type: torch.get_device_module(device.type)} if device.type != "cpu" else {})


def generator_states(device):
    """Returns {device type: states (processes, bytes) uint8}. Collective."""
    own = {kind: module.get_rng_state() for kind, module in generators(device).items()}
    return {kind: torch.stack(parallel.gather_objects(state)) for kind, state in own.items()}


def set_generator_states(states, device):
    """Restores this process's generators; a process without a row, or a device without one, keeps its seed."""
    for kind, module in generators(device).items():
        if kind in states and parallel.rank() < len(states[kind]):
            module.set_rng_state(states[kind][parallel.rank()].clone())  # it ignores a view's offset
