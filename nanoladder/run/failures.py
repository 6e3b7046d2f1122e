"""Errors of torch.compile, as one line."""

import sys


def explain_compiler_failure(error, config):
    """Exits with one line if the error comes from torch.compile."""
    if config.compile and is_compiler_failure(error):
        reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
        sys.exit(f"error: torch.compile failed: {reason}; --compile=False turns it off")


def is_compiler_failure(error):
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second
    return dynamo is not None and isinstance(error, dynamo.exc.TorchDynamoException)
