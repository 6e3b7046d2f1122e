"""Tensor parallelism: the processes of a group share every matrix and every sequence."""


def apply_tensor_parallel(model):
    """Cuts the model in place. Does nothing unless several processes share it."""
