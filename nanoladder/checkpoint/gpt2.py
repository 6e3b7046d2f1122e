"""A GPT-2's weights under GPT-2's names, as the files of Hugging Face and of nanoGPT have them."""

import torch

from model import GPT
from nanoladder.checkpoint.check import config_of

PARTS = {  # of a weight's name
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "blocks": "h",
    "attention_norm": "ln_1",
    "attention": "attn",
    "qkv": "c_attn",
    "mlp_norm": "ln_2",
    "fc": "c_fc",
    "proj": "c_proj",
    "norm": "ln_f",
}
PREFIX, HEAD = "transformer.", "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, in older files


def gpt2_name(name):
    """Returns GPT-2's name of a weight, without prefix: blocks.3.mlp.fc.bias -> h.3.mlp.c_fc.bias."""
    return ".".join(PARTS.get(part, part) for part in name.split("."))


def shapes(config):
    """Returns {name: shape} of a model's weights, a tied one once."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT(config).named_parameters()}


def our_weights(tensors, config, transposed=()):
    """Returns {our name: tensor} of {GPT-2's name without prefix: tensor}, which it empties. Copies nothing.

    config: the dict of the model's config. transposed: ends of our names of the weights that the file has as (in, out).
    Raises KeyError if a tensor is missing, ValueError if one is unknown, of another shape, or if the head is not tied.
    """
    weights = {}
    for name, shape in shapes(config_of({"config": config})).items():
        tensor = tensors.pop(gpt2_name(name))
        tensor = tensor.t() if name.endswith(transposed) else tensor
        if tensor.shape != shape:
            raise ValueError(f"its {gpt2_name(name)} is {tuple(tensor.shape)}, unlike what its config says")
        weights[name] = tensor
    head, tokens = tensors.pop(HEAD, None), weights["token_embedding.weight"]
    if head is not None and not torch.equal(head.float(), tokens.float()):
        raise ValueError(f"its {HEAD} differs from the token embedding; here the two are tied")
    if unknown := [name for name in tensors if not name.endswith(MASKS)]:
        raise ValueError(f"it has tensors that GPT-2 does not have, such as {min(unknown)}")
    return weights
