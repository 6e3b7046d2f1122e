"""Size of a training state in bytes, before anything is built."""

import math
from typing import NamedTuple

from nanoladder import machine, optim, parallel
from nanoladder.arithmetic import count_parameters, list_weights
from nanoladder.errors import BadInput


class StateBytes(NamedTuple):
    """Bytes of one process's training state, the mean of those that share it. A step needs activations besides."""

    weights: int
    gradients: int
    optimizer: int


def state_bytes(config):
    """Returns the StateBytes of a config in this process: all that is alive when the optimizer steps."""
    weights = list_weights(config)
    n = sum(count * math.prod(shape) for _, shape, count in weights)
    state = sum(count * optim.count_state_bytes(config, name, shape) for name, shape, count in weights)
    mesh = parallel.mesh()
    n_sharing = mesh.sizes.pipeline * mesh.sizes.tensor * mesh.n_sharing
    gradients = 0 if config.optimizer_in_backward else 4 * n
    return StateBytes(*(round(part / n_sharing) for part in (4 * n, gradients, state)))


def require_memory(config, device):
    """Raises BadInput if the training state alone exceeds the device's whole memory."""
    total = machine.total_memory(device)
    if sum(state_bytes(config)) > total:
        raise BadInput(
            f"n_layer={config.n_layer}, n_embd={config.n_embd}, vocab_size={config.vocab_size}: "
            f"{count_parameters(config):,} parameters take {describe_state(config)}, but {device.type} has "
            f"{in_gb(total)} for this process; expected a smaller --n_layer or --n_embd, --optimizer=adafactor, or "
            "several devices with --shard=full (docs/memory.md)"
        )


def describe_state(config):
    """Describes the StateBytes of a config."""
    state = state_bytes(config)
    return (
        f"{in_gb(sum(state))} before activations: weights {in_gb(state.weights)}, gradients {in_gb(state.gradients)}, "
        f"{config.optimizer} {in_gb(state.optimizer)}"
    )


def in_gb(n_bytes):
    """Formats bytes in GB (1e9 bytes), or in MB if there are fewer."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"
