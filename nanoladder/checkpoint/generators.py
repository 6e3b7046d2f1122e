"""States of the random generators as tensors, one row per process."""

import torch

from nanoladder import parallel


def generator_states():
    """Returns {device type: states (processes, bytes) uint8}. Collective."""
    states = {"cpu": parallel.gather_rows(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        states["cuda"] = parallel.gather_rows(torch.cuda.get_rng_state())
    return states


def set_generator_states(states):
    """Restores this process's generators; a process without a row keeps its seed. Raises ValueError if invalid."""
    if "cpu" not in states:
        raise ValueError("it has no state of the cpu generator")
    for kind, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if kind in states and (kind == "cpu" or torch.cuda.is_available()):
            try:
                if parallel.rank() < len(states[kind]):
                    set_state(states[kind][parallel.rank()].clone())  # it ignores a view's offset
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"{kind} generator: {error}") from None
