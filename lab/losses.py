"""Head and cross-entropy by themselves: the model's operator beside PyTorch's functions and Liger's kernel.

Forward and backward of random hidden states, of the config's shapes and dtype; products run under autocast.
"""

import importlib.util
import math
import statistics

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import train
from lab.limits import median_seconds
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.kernels import head_loss


def whole(hidden, weight, targets, n_vocab):
    """The model's own loss at loss_chunks=0: all logits, those of the padding masked by a bias."""
    bias = torch.zeros(len(weight), device=weight.device)
    bias[n_vocab:] = -math.inf
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")


def linear_cross_entropy(hidden, weight, targets, n_vocab):
    """PyTorch's function, in chunks of its own choice. It cannot mask the padding, so it has none."""
    if not hasattr(F, "linear_cross_entropy"):
        raise BadInput("F.linear_cross_entropy: needs torch 2.13")
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight[:n_vocab], targets, reduction="sum", options=options)


def liger(hidden, weight, targets, n_vocab):
    """Liger's kernel, in chunks of its own choice. It cannot mask the padding, so it has none."""
    if not importlib.util.find_spec("liger_kernel"):
        raise BadInput("Liger: not installed: python -m pip install liger-kernel")
    if not hidden.is_cuda:
        raise BadInput("Liger: needs a GPU")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = hidden.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else hidden
    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight[:n_vocab].to(hidden.dtype), hidden, targets)


def chunks(n_chunks):
    return lambda hidden, weight, targets, n_vocab: head_loss(hidden, weight, targets, n_vocab, n_chunks)


VARIANTS = {  # name: (function, compiled)
    "cross_entropy": (whole, False),
    "cross_entropy, compiled": (whole, True),
    "linear_cross_entropy": (linear_cross_entropy, False),
    "Liger": (liger, False),
    **{
        f"head_loss, {n} chunk{'s' * (n > 1)}{', compiled' * compiled}": (chunks(n), compiled)
        for n in (1, 8, 32)
        for compiled in (False, True)
    },
}


def measure(config, variant):
    """Seconds and peak bytes of a forward and backward, and the mean loss, in nats per token."""
    device = train.set_up(config)
    dtype = machine.choose_dtype(config.dtype, device)
    function, compiled = VARIANTS[variant]
    n_tokens = (config.micro_batch_size or config.batch_size) * config.context_length
    torch.manual_seed(config.seed)
    hidden = torch.randn(n_tokens, config.n_embd).to(device).requires_grad_()
    weight = (
        torch.nn.init.normal_(torch.empty(config.padded_vocab_size, config.n_embd), std=0.02)
        .to(device)
        .requires_grad_()
    )
    targets = torch.randint(config.vocab_size, (n_tokens,)).to(device)

    def forward(hidden, weight):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return function(hidden, weight, targets, config.vocab_size) / n_tokens

    forward = torch.compile(forward, dynamic=False) if compiled else forward

    def step():
        loss = forward(hidden, weight)
        loss.backward()
        hidden.grad = weight.grad = None
        return loss.detach()

    loss = float(step())  # compiles
    return {"seconds": median_seconds(step, device), "bytes": peak_bytes(step, device), "loss": loss}


def peak_bytes(step, device):
    """The most bytes that a call allocates at a time."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = peak = 0
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return peak


def table(rows, conditions):
    """The rows, {variant: its measurements, or the reason why there are none}, as a Markdown table."""
    lines = [conditions, "", "| | ms | GB at the peak | loss |", "|---|---|---|---|"]
    for name, found in rows.items():
        if not found:
            continue  # not yet
        cells = [found, "", ""]
        if not isinstance(found, str):
            seconds = statistics.median(row["seconds"] for row in found)
            cells = [f"{1e3 * seconds:.1f}", f"{found[0]['bytes'] / 1e9:.3f}", f"{found[0]['loss']:.5f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
