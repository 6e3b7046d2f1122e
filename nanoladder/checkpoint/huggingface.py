"""GPT-2 in Hugging Face's format."""

from nanoladder.errors import BadInput


def find_folder(name):
    """Returns the folder of a model, which is a local one or the hub's."""
    raise BadInput(f"hf:{name}: not read yet")


def read(name):
    """Returns a dict with the "config" and the weights, "model", of a GPT-2 in the hub or in a folder."""
    raise BadInput(f"hf:{name}: not read yet")
