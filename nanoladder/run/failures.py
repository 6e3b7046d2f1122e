"""Explanations of machine failures that end a program: running out of memory, and torch.compile errors."""

import contextlib
import sys

from nanoladder import machine
from nanoladder.run import memory


def explain_failure(error, config, device, available):
    """Explains and exits if memory ran out (exit code 3) or torch.compile failed (1); returns for any other error.

    available: bytes available to the run before it allocated any; 0 for the bytes free now.
    """
    if memory.is_out_of_memory(error):
        memory.explain(config, device, available, error)
        sys.exit(3)
    explain_compiler_failure(error, config)


def explain_compiler_failure(error, config):
    """Exits with one line if the error comes from torch.compile."""
    if config.compile and is_compiler_failure(error):
        reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
        sys.exit(f"error: torch.compile failed: {reason}; --compile=False turns it off")


def is_compiler_failure(error):
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second
    return dynamo is not None and isinstance(error, dynamo.exc.TorchDynamoException)


@contextlib.contextmanager
def explained(config):
    """Explains failures inside the `with` block, for programs that train without a Run."""
    device = machine.choose_device(config.device)
    available = memory.available_bytes(config, device) if device.type == "cpu" else 0
    try:
        yield
    except Exception as error:
        explain_failure(error, config, device, available)
        raise
