"""nanoGPT's ckpt.pt: a dict that torch.save wrote, with the weights under GPT-2's names and the shape in model_args."""

import pickle
import re

import torch

from nanoladder.checkpoint.check import config_of, damage, shapes
from nanoladder.errors import BadInput

MARK, BEGINNING = b"model_args", 2**24  # a key of nanoGPT's dict, and the bytes within which its pickle ends
ARGUMENTS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "bias": "bias"} | {
    "vocab_size": "vocab_size",
    "context_length": "block_size",
}
GPT2_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
    "norm": "transformer.ln_f",
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
        return {"config": config, "model": read_weights(saved["model"], config)}
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
    config |= {"pad_vocab_to": 64 if padded else 1, "compile": False}
    config_of({"config": config})
    return config


def read_weights(found, config):
    """Returns {name: float32 tensor} of a state dict of nanoGPT's. Raises ValueError if it does not fit the config."""
    found = {name.removeprefix(COMPILED): tensor for name, tensor in found.items()}
    weights = {}
    for name, shape in shapes(config_of({"config": config})):
        theirs = gpt2_name(name)
        tensor = found.pop(theirs, None)
        usual = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_contiguous()
        if not usual or tensor.shape != shape:
            raise ValueError(f"its {theirs} is not a tensor {tuple(shape)}, as its model_args require")
        weights[name] = tensor.float()
    head = found.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head.float(), weights["token_embedding.weight"]):
        raise ValueError("its lm_head.weight is not its token embedding; expected tied weights")
    if unknown := [name for name in found if not name.endswith(".attn.bias")]:  # that is the causal mask
        raise ValueError(f"it has weights that a GPT-2 does not have, such as {min(unknown)}")
    return weights


def gpt2_name(name):
    """Returns GPT-2's name of a weight: blocks.3.mlp.fc.bias -> transformer.h.3.mlp.c_fc.bias."""
    module, _, kind = name.rpartition(".")
    block = re.match(r"blocks\.(\d+)\.", module)
    prefix = f"transformer.h.{block[1]}." if block else ""
    return f"{prefix}{GPT2_NAMES[module[block.end() if block else 0 :]]}.{kind}"
