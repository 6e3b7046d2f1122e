"""A GPT-2's weights under GPT-2's names, as the files of Hugging Face and of nanoGPT have them."""

import torch

from nanoladder.checkpoint.check import config_of, shapes

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


def our_weights(tensors, config, transposed=()):
    """Returns {our name: float32 tensor} of {GPT-2's name without prefix: tensor}, which it empties to save memory.

    config: the dict of the model's config. transposed: ends of our names of the weights that the file has as (in, out).
    Raises ValueError if a tensor is missing, unknown, of another shape or not of floats, or if the head is not tied.
    """
    weights = {}
    for name, shape in shapes(config_of({"config": config})):
        theirs, turned = gpt2_name(name), name.endswith(transposed)
        if theirs not in tensors:
            raise ValueError(f"it has no {theirs}")
        tensor, expected = tensors.pop(theirs), tuple(reversed(shape) if turned else shape)
        usual = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_contiguous()
        if not usual or tensor.shape != expected:
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
            raise ValueError(f"its {theirs} is {found}; expected contiguous floats {expected}, as its config says")
        weights[name] = (tensor.t() if turned else tensor).float().contiguous()
    head, tokens = tensors.pop(HEAD, None), weights["token_embedding.weight"]
    if head is not None and not (head.shape == tokens.shape and torch.equal(head.float(), tokens)):
        raise ValueError(f"its {HEAD} differs from the token embedding; here the two are tied")
    if unknown := [name for name in tensors if not name.endswith(MASKS)]:
        raise ValueError(f"it has tensors that GPT-2 does not have, such as {min(unknown)}")
    return weights
