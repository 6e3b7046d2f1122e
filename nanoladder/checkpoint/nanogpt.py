"""nanoGPT's ckpt.pt: a dict that torch.save wrote, with the weights under GPT-2's names and the shape in model_args."""

import pickle
import re

import torch

from nanoladder.checkpoint.check import config_of, damage
from nanoladder.checkpoint.gpt2 import PREFIX, our_weights
from nanoladder.errors import BadInput

MARK, BEGINNING = b"model_args", 2**24  # a key of nanoGPT's dict, and the bytes within which its pickle ends
ARGUMENTS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "bias": "bias"} | {
    "vocab_size": "vocab_size",
    "context_length": "block_size",
}
COMPILED = "_orig_mod."  # torch.compile's prefix of every name
GPT2_VOCABULARY, PADDED = 50257, 50304  # nanoGPT counts the rows of its padding as tokens


def wrote(path):
    """True if path is a checkpoint of nanoGPT, whole or damaged. Reads the file's beginning, and unpickles nothing."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04" and MARK in file.read(BEGINNING)
    except OSError:  # loading says why
        return False


def read(path):
    """Returns a dict with the "config" and the weights, "model", of nanoGPT's checkpoint. Its tensors are mapped.

    Executes nothing: raises BadInput if the file holds more than tensors and plain values, or is damaged. GPT-2's
    vocabulary, which nanoGPT pads to 50304 tokens, has its 50257 here. The optimizer's state is not used.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        config = read_config(saved["model_args"])
        tensors = {name.removeprefix(COMPILED).removeprefix(PREFIX): value for name, value in saved["model"].items()}
        return {"config": config, "model": our_weights(tensors, config)}
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else "an object"
        raise BadInput(
            f"{path} holds {what}, which may run code when it is loaded; expected tensors and plain values alone, "
            "as in the ckpt.pt that nanoGPT's train.py writes"
        ) from None
    except KeyError as error:
        raise damage(path, f"it has no {error}", "a ckpt.pt of nanoGPT") from None
    except Exception as error:  # a damaged file fails in many ways
        raise damage(path, error, "a ckpt.pt of nanoGPT") from None


def read_config(arguments):
    """Returns the config of nanoGPT's model_args. Raises KeyError, TypeError or BadInput."""
    config = {key: arguments[name] for key, name in ARGUMENTS.items()}
    padded = config["vocab_size"] == PADDED
    config |= {"vocab_size": GPT2_VOCABULARY} if padded else {}
    config |= {"pad_vocab_to": 64 if padded else 1}
    config_of({"config": config})
    return config
