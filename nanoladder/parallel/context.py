"""Context parallelism: the processes of a group share every sequence."""


def positions(context_length):
    """Positions of a sequence that this process trains on: a tensor (T,), or None for all of them."""
    return None


def apply_context_parallel(model):
    """Makes attention exchange what it needs. Does nothing unless several processes share a sequence."""
