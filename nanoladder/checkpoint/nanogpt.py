"""nanoGPT's ckpt.pt: a dict that torch.save wrote, with the weights under GPT-2's names and the shape in model_args."""

import pickle

import torch

from nanoladder.checkpoint.check import reading
from nanoladder.checkpoint.gpt2 import PREFIX, our_weights

COMPILED = "_orig_mod."  # torch.compile's prefix of every name
GPT2_VOCABULARY, PADDED = 50257, 50304  # nanoGPT counts the rows of its padding as tokens


def read(path):
    """Returns a dict with the "config" and the weights, "model", of nanoGPT's checkpoint. Its tensors are mapped.

    Executes nothing: raises Damaged if the file holds more than tensors and plain values, or is not whole. The
    optimizer's state is not used.
    """
    with reading(path, "a ckpt.pt of nanoGPT"):
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise ValueError("it holds more than tensors and plain values, which may run code") from None
        arguments = saved["model_args"]
        config = {key: arguments[key] for key in ("n_layer", "n_head", "n_embd", "bias", "vocab_size")}
        config |= {"context_length": arguments["block_size"], "pad_vocab_to": 1}
        if config["vocab_size"] == PADDED:
            config |= {"vocab_size": GPT2_VOCABULARY, "pad_vocab_to": 64}
        tensors = {name.removeprefix(COMPILED).removeprefix(PREFIX): value for name, value in saved["model"].items()}
        return {"config": config, "model": our_weights(tensors, config)}
