"""nanoGPT's ckpt.pt."""


def wrote(path):
    """True if path is a checkpoint of nanoGPT."""
    return False


def read(path):
    """Returns a dict with the "config" and the weights, "model", of nanoGPT's checkpoint."""
