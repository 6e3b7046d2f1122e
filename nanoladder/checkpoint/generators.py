"""The states of the random generators as tensors, one row per process."""

import torch

from nanoladder import parallel


def generator_states():
    """The states by device, each (processes, bytes). Every process has to call it."""
    states = {"cpu": parallel.gather_rows(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        states["cuda"] = parallel.gather_rows(torch.cuda.get_rng_state())
    return states


def set_generator_states(states):
    """Sets the generators of this process; one more than the file's processes stays as seeded. Raises ValueError."""
    if "cpu" not in states:
        raise ValueError("it has no generator of the cpu")
    for kind, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if kind in states and (kind == "cpu" or torch.cuda.is_available()):
            try:
                if parallel.rank() < len(states[kind]):
                    set_state(states[kind][parallel.rank()].clone())  # of a view it reads the storage from its start
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"generator of the {kind}: {error}") from None
