"""An optimizer's state as a file holds it: by parameter name, whole, as plain tensors and values; and back."""

import torch

from nanoladder import machine, parallel
from nanoladder.checkpoint.check import check_like


def names(model):
    """{parameter: its plain name}; a tied weight has the first of its names."""
    found = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        found.setdefault(parameter, name)
    return found


def parameters(optimizer):
    """The parameters in the order in which an optimizer's state_dict() numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_state(model, optimizer):
    """{parameter name: {state name: value}}: what the optimizer has learned, this process's part if it is sharded."""
    name_of, order = names(model), parameters(optimizer)
    return {name_of[order[index]]: values for index, values in optimizer.state_dict()["state"].items()}


def load_optimizer(model, optimizer, state):
    """Puts in what an optimizer has learned, as a file has it. Raises ValueError if it is not this optimizer's.

    Hyperparameters stay as the config has them.
    """
    name_of, order = names(model), parameters(optimizer)
    index_of = {name_of[parameter]: index for index, parameter in enumerate(order)}
    groups = optimizer.state_dict()["param_groups"]
    if state.keys() - index_of.keys():
        raise ValueError("its optimizer has state of weights that are not this model's")
    try:
        learned = {
            name: {key: from_plain(own(value), order[index_of[name]]) for key, value in values.items()}
            for name, values in state.items()
        }
    except (ArithmeticError, AssertionError, AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"its optimizer's state is not this run's: {error}") from None
    expected = first_state(model, optimizer)
    # Which matrices are in 8 bits depends on the number of processes: they are compared as they are here.
    check_like(expected, learned if in_8_bits(expected) else state, "optimizer")
    numbered = {index_of[name]: values for name, values in learned.items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def first_state(model, optimizer):
    """The state that a first step makes, from gradients of 0 at a learning rate of 0, one parameter at a time."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            parameter.grad = None
    state = named_state(model, optimizer)
    optimizer.state.clear()
    return state


def own(value):
    """A copy of a tensor, or of a dict of tensors, in memory of its own; any other value as it is."""
    if isinstance(value, dict):
        return {name: own(part) for name, part in value.items()}
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


# -- 8 bits


def to_plain(state):
    """Optimizer state, {parameter: {state name: value}}, each 8-bit tensor as a dict of its plain parts."""
    return {key: {name: plain_parts(value) for name, value in values.items()} for key, values in state.items()}


def in_8_bits(state):
    """True if any tensor of an optimizer's state is in 8 bits."""
    return any(isinstance(value, dict) for values in to_plain(state).values() for value in values.values())


@torch.no_grad()
def plain_parts(value):
    """{codes, scale, qmap, signed} of an 8-bit tensor, sharded if the tensor is; any other value as it is."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if not hasattr(local, "codes"):
        return value
    codes, scale = parallel.as_shards([local.codes, local.scale], value)
    return {"codes": codes, "scale": scale, "qmap": local.qmap, "signed": local.signed}


def from_plain(value, parameter):
    """This process's part of a value of a parameter's state, given whole and plain as in a file.

    Raises ValueError, or whatever torchao raises, if the parts of an 8-bit tensor do not belong together.
    """
    if not isinstance(value, dict):
        return parallel.local_shard(value, parameter)
    machine.eight_bit_library(parameter.device)
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = OptimState8bit(**value)
    float32 = whole.scale.dtype == whole.qmap.dtype == torch.float32
    if not float32 or whole.qmap.shape != (256,) or type(whole.signed) is not bool:
        raise ValueError("its 8-bit optimizer state has parts of another kind")
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if local.numel() % whole.block_size:  # a shard would end within a block
        return parallel.local_shard(whole.dequantize(), parameter)
    own = [parallel.local_rows(value[name], parameter) for name in ("codes", "scale")]
    return parallel.as_shards([OptimState8bit(*own, value["qmap"], value["signed"])], parameter)[0]
