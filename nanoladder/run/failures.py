"""Failures of the machine that end a program in an explanation: memory that runs out, and a compiler that fails."""

import contextlib
import sys

import torch

from nanoladder import machine
from nanoladder.run import memory


def explain_failure(error, config, device, available):
    """Ends the program if memory ran out (exit code 3) or torch.compile failed (1); returns for any other error.

    available: bytes that the run could take, measured before it took any; 0: whatever is free now.
    """
    if memory.is_out_of_memory(error):
        memory.explain(config, device, available, error)
        sys.exit(3)
    explain_compiler_failure(error, config)


def explain_compiler_failure(error, config):
    """Ends the program in one line if the error is torch.compile's."""
    if config.compile and isinstance(error, torch._dynamo.exc.TorchDynamoException):
        reason = str(error).strip().splitlines()[0]
        sys.exit(f"error: torch.compile failed: {reason}; --compile=False goes without it")


@contextlib.contextmanager
def explained(config):
    """Explains failures inside, for programs that train without a Run."""
    device = machine.choose_device(config.device)
    available = memory.available_bytes(config, device) if device.type == "cpu" else 0
    try:
        yield
    except Exception as error:
        explain_failure(error, config, device, available)
        raise
