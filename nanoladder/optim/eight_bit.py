"""8-bit AdamW, from torchao or bitsandbytes."""

import torch

from nanoladder import machine


def adamw8bit(groups, config):
    """Builds AdamW with both moments quantized to 8 bits in blocks of 256 (Dettmers et al. 2022).

    groups: list of parameter groups. Raises BadInput if neither library is installed.
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
    """Converts the learning rate to a tensor, because a compiled update would treat a float as a constant."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
