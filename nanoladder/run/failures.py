"""Errors of torch.compile, as one line, and of memory, for programs that train without a Run."""

import contextlib
import sys

from nanoladder import machine
from nanoladder.run import memory


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
    """Explains failures inside the `with` block."""
    try:
        yield
    except Exception as error:
        if memory.is_out_of_memory(error):
            memory.explain(memory.summary(error), config, machine.choose_device(config.device))
            sys.exit(3)
        explain_compiler_failure(error, config)
        raise
