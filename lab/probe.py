"""Probes this machine before anything is measured on it: python -m lab.probe config/x.py [--key=value ...]

Prints one line of JSON: the machine and its limits, each attention kernel at the config's shape, and compiled against
eager gradients of the config's model on random tokens. Needs no dataset.
"""

import dataclasses
import json
from nanoladder.entry import run_script

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import train
from lab.limits import describe, limits, median_seconds
from nanoladder import machine
from nanoladder.data import Batch
from nanoladder.run import load_config

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def main(argv):
    config = load_config(argv)
    device = train.set_up(config)
    found = {
        "machine": describe(device),
        "limits": limits(device),
        "attention": {name: attention(backend, config, device) for name, backend in KERNELS.items()},
        "gradients": compiled_against_eager(config, device),
    }
    print(json.dumps(found))


def attention(backend, config, device):
    """A kernel's seconds, forward and backward, and its error against float32; the reason if it is not available.

    error: largest of output and gradients of q, k and v, each ‖found - expected‖ / ‖expected‖.
    """
    shape = config.batch_size, config.n_head, config.context_length, config.n_embd // config.n_head
    generator = torch.Generator().manual_seed(config.seed)
    exact = [torch.randn(shape, generator=generator).to(device) for _ in range(4)]  # q, k, v, output's gradient

    def attend(q, k, v, upstream):
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = scaled_dot_product_attention(*inputs, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    rounded = [tensor.to(machine.choose_dtype(config.dtype, device)) for tensor in exact]
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(*(tensor.float() for tensor in rounded))
    try:
        with sdpa_kernel(backend):
            found = attend(*rounded)
            seconds = median_seconds(lambda: attend(*rounded), device)
    except RuntimeError as error:
        return {"reason": str(error).splitlines()[0]}
    return {"seconds": seconds, "error": max(map(relative_error, found, expected))}


def compiled_against_eager(config, device):
    """The losses of a batch, and the largest error of a parameter's gradient: ‖compiled - eager‖ / ‖eager‖."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = config.batch_size, config.context_length
    tokens = (torch.randint(config.vocab_size, shape, generator=generator) for _ in range(2))
    batch = Batch(*tokens).to(device)
    losses, gradients = {}, {}
    for compiled in (False, True):
        model = train.build_model(dataclasses.replace(config, compile=compiled), device)
        losses[compiled] = float(train.forward_backward(model, batch, config))
        gradients[compiled] = {name: parameter.grad for name, parameter in model.named_parameters()}
    errors = {name: relative_error(gradients[True][name], eager) for name, eager in gradients[False].items()}
    worst = max(errors, key=errors.get)
    return {"eager_loss": losses[False], "compiled_loss": losses[True], "error": errors[worst], "parameter": worst}


def relative_error(found, expected):
    """‖found - expected‖ / ‖expected‖; infinite if it is no number."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if error < float("inf") else float("inf")


if __name__ == "__main__":
    run_script(main)
