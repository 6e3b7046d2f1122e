"""AdamW with its state in 8 bits, by torchao or bitsandbytes, and that state as plain tensors for checkpoints."""

import torch

from nanoladder import machine, parallel


def adamw8bit(groups, config):
    """AdamW whose two averages take 8 bits a number, scaled in blocks of 256 (Dettmers et al. 2022).

    groups: parameter groups, a list of dicts. Raises BadInput if neither library is installed.
    """
    options = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    if machine.eight_bit_library(groups[0]["params"][0].device) == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(groups, **options)
    optimizer.register_step_pre_hook(lr_to_tensor)
    if not config.compile:  # torchao compiles its update
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def lr_to_tensor(optimizer, *_):
    """Makes the learning rate a tensor: a compiled update would treat a number as a constant."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


def to_plain(state):
    """Optimizer state, {parameter: {name: value}}, with each 8-bit tensor as a dict of its plain parts."""
    return {index: {name: plain_parts(value) for name, value in values.items()} for index, values in state.items()}


def in_8_bits(state):
    """True if any of an optimizer's state is in 8 bits."""
    return any(isinstance(value, dict) for values in to_plain(state).values() for value in values.values())


@torch.no_grad()
def plain_parts(value):
    """{codes, scale, qmap, signed} of an 8-bit tensor, sharded if it is; any other value unchanged."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if not hasattr(local, "codes"):
        return value
    codes, scale = parallel.as_shards([local.codes, local.scale], value)
    return {"codes": codes, "scale": scale, "qmap": local.qmap, "signed": local.signed}


def from_plain(value, parameter):
    """This process's part of a parameter's state, from a value that to_plain put into a checkpoint."""
    if not isinstance(value, dict):
        return parallel.local_shard(value, parameter)
    machine.eight_bit_library(parameter.device)
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = OptimState8bit(**value)
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if local.numel() % whole.block_size:  # a shard would end within a block
        return parallel.local_shard(whole.dequantize(), parameter)
    own = [parallel.local_rows(value[name], parameter) for name in ("codes", "scale")]
    return parallel.as_shards([OptimState8bit(*own, value["qmap"], value["signed"])], parameter)[0]
