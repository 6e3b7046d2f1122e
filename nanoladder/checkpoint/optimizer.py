"""Conversion of optimizer state to and from its form in a file: whole, plain tensors and values by parameter name."""

import torch

from nanoladder import machine, parallel
from nanoladder.checkpoint.check import check_like, shapes


def names(model):
    """Returns {parameter: plain name}; a tied weight has one name, on the last stage of a pipeline too."""
    tensors = model.state_dict(keep_vars=True).items()
    return {parameter: parallel.TIED if name == parallel.COPY else name for name, parameter in tensors}


def parameters(optimizer):
    """Lists an optimizer's parameters in the order of their numbers in state_dict()."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_state(model, optimizer):
    """Returns the optimizer's state, {parameter name: {state name: value}}; values may be shards."""
    name_of, order = names(model), parameters(optimizer)
    return {name_of[order[index]]: values for index, values in optimizer.state_dict()["state"].items()}


def load_optimizer(model, optimizer, state):
    """Loads optimizer state in a file's form. Hyperparameters keep the config's values.

    Raises ValueError if the state does not belong to this optimizer and model.
    """
    name_of, order = names(model), parameters(optimizer)
    index_of = {name_of[parameter]: index for index, parameter in enumerate(order)}
    groups = optimizer.state_dict()["param_groups"]
    if state.keys() - dict(shapes(model.config)).keys():
        raise ValueError("its optimizer has state of weights that are not this model's")
    state = {name: values for name, values in state.items() if name in index_of}  # of this process's stages
    try:
        learned = {
            name: {key: from_plain(own(value), order[index_of[name]], name) for key, value in values.items()}
            for name, values in state.items()
        }
    except (ArithmeticError, AssertionError, AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"its optimizer's state is not this run's: {error}") from None
    expected = first_state(model, optimizer)
    # The set of 8-bit matrices depends on the number of processes, so compare them after conversion.
    check_like(expected, learned if in_8_bits(expected) else state, "optimizer")
    numbered = {index_of[name]: values for name, values in learned.items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def first_state(model, optimizer):
    """Returns the state that a first step creates. Steps with zero gradients and lr 0, one parameter at a time."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                parameter.grad = None
    state = named_state(model, optimizer)
    optimizer.state.clear()
    return state


def own(value):
    """Copies a tensor, or a dict of tensors, out of the mapped file; returns any other value unchanged."""
    if isinstance(value, dict):
        return {name: own(part) for name, part in value.items()}
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


# -- 8 bits


def to_plain(state):
    """Converts optimizer state, {parameter: {state name: value}}: each 8-bit tensor to a dict of plain parts."""
    return {key: {name: plain_parts(value) for name, value in values.items()} for key, values in state.items()}


def in_8_bits(state):
    """True if an optimizer's state contains an 8-bit tensor."""
    return any(isinstance(value, dict) for values in to_plain(state).values() for value in values.values())


@torch.no_grad()
def plain_parts(value):
    """Returns {codes, scale, qmap, signed} of an 8-bit tensor, sharded like it; any other value unchanged."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if not hasattr(local, "codes"):
        return value
    codes, scale = parallel.as_shards([local.codes, local.scale], value)
    return {"codes": codes, "scale": scale, "qmap": local.qmap, "signed": local.signed}


def from_plain(value, parameter, name):
    """Converts a value of the named parameter's state from its whole, plain form in a file to this process's shard.

    Raises ValueError, or an exception from torchao, if the parts of an 8-bit tensor are inconsistent.
    """
    if not isinstance(value, dict):
        return parallel.local_shard(value, parameter, name)
    machine.eight_bit_library(parameter.device)
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = OptimState8bit(**value)
    float32 = whole.scale.dtype == whole.qmap.dtype == torch.float32
    if not float32 or whole.qmap.shape != (256,) or type(whole.signed) is not bool:
        raise ValueError("its 8-bit optimizer state has parts of an unexpected dtype or shape")
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if local.numel() % whole.block_size:  # a shard would end inside a quantization block
        return parallel.local_shard(whole.dequantize(), parameter, name)
    own = [parallel.local_rows(value[name], parameter) for name in ("codes", "scale")]
    return parallel.as_shards([OptimState8bit(*own, value["qmap"], value["signed"])], parameter)[0]
