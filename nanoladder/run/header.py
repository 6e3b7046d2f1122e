"""Header of a run: the model, the data, the config's differences from the defaults, and each choice with its reason."""

import math
import os
import textwrap

import torch
import torch.distributed as dist

from nanoladder import machine, optim, parallel
from nanoladder.arithmetic import CUTS, count_parameters, count_tokens, flops_per_token
from nanoladder.config import differences
from nanoladder.run.size import in_gb, state_bytes
from operators import count_chunks, triton_obstacle

WIDTH, LINES = 80, 10  # of a terminal; of the header
SHOWN = ("out_dir", "dataset", "n_layer", "n_head", "n_embd", "context_length", "vocab_size", "batch_size", "max_steps")
SHOWN += ("micro_batch_size",)  # keys that stand in other lines than config


def print_header(config, device, attention):
    """Prints the header but for its last line, before the model is built. attention: describes its kernel.

    The config gets the lines that the others leave of LINES, the last one included.
    """
    tokens = config.batch_size * config.context_length
    flops = flops_per_token(config) * config.max_steps * tokens
    micro = f", {config.micro_batch_size} at a time" if config.micro_batch_size else ""
    shape = f"{several(config.n_layer, 'block')}, {several(config.n_head, 'head')}, width {config.n_embd:,}"
    about = {
        "model": f"{count_parameters(config):,} parameters: {shape}; {in_gb(sum(state_bytes(config)))} of state",
        "run": f"{config.out_dir}: {several(config.max_steps, 'step')} of {config.batch_size:,} × "
        f"{config.context_length:,} tokens{micro}, {flops:.3g} FLOP",
    }
    chosen = choices(config, device, attention)
    n_others = 1 + sum(len(wrapped(*line)) for line in (about | chosen).items())
    print_lines(about)
    print("\n".join(wrapped("config", changed(config), max(1, LINES - n_others))))
    print_lines(chosen)


def print_lines(lines):
    """Prints lines of the header, {name: text}."""
    for line in lines.items():
        print("\n".join(wrapped(*line)))


def wrapped(name, text, most=None):
    """Returns a line of the header as lines of WIDTH, at most `most` of them. Long paths stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{name:<9} ",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=" … (config.json has all)",
    )


def changed(config):
    """Returns the keys that differ from the defaults, but for those of other lines of the header, as text."""
    keys = {key: value for key, value in differences(config).items() if key not in SHOWN}
    words = [
        key if value is True else f"{key}={value:g}" if type(value) is float else f"{key}={value}"
        for key, value in keys.items()
    ]
    return " ".join(words) or "all defaults"


def several(n, noun):
    """Returns a number with its noun: 1 chunk, 2 chunks."""
    return f"{n:,} {noun}{'s' if n > 1 else ''}"


def data_line(config, dataset, counted):
    """Returns {name: text} about the data. counted: {name: loss}, what a model must beat to know more than a table."""
    text = f"{config.dataset}, {config.vocab_size:,} ids ({dataset.meta.get('tokenizer', 'unknown tokenizer')})"
    if counted:
        unit, name = (dataset.bits_per_nat, "bpb") if dataset.bits_per_nat else (1.0, "nats")
        trigrams, copies = (unit * counted[kind] for kind in ("trigrams", "trigrams and copies"))
        text += f": trigrams {trigrams:.3f}, with copies {copies:.3f} {name}"
    return {"data": text}


def choices(config, device, attention):
    """Returns {name: choice made on this machine and its reason}."""
    compiled = "each block" if config.compiles_blocks else "the model"
    step = [f"compile: {compiled if config.compile else 'off'}"]
    if config.float8:
        step.append(f"float8: {float8(config, device)}")
    if config.half_residual:
        stream = str(machine.choose_dtype(config.dtype, device)).removeprefix("torch.")
        step.append(f"residual stream: {stream}{', as products are' * (stream == 'float32')}")
    if config.cuda_graph:
        obstacle = machine.capture_obstacle(config, device)
        step.append(f"CUDA graph: {f'off ({obstacle})' if obstacle else 'on'}")
    chosen = {
        "device": f"{machine.device_name(device)}, {in_gb(machine.free_memory(device))} free; {dtype(config, device)}",
        "attention": attention,
        "step": "; ".join([*step, loss(config, device)]),
    }
    if (factor := optim.RELATIVE_LR.get(config.optimizer, 1.0)) != 1:
        chosen["optimizer"] = f"{config.optimizer} at {factor:g} × the lr logged"
    return chosen | processes(config)


def processes(config):
    """Returns {name: text} about the processes' division of the work, or the keys without effect in a single one."""
    if (n := parallel.world_size()) > 1:
        return {"processes": f"{n} by {dist.get_backend()} = {parallel.mesh().sizes}, shard={config.shard}"}
    idle = [key for key in (*CUTS, "shard") if getattr(config, key) not in (1, "none")]
    return {"alone": f"{', '.join(idle)}: no effect with one process"} if idle else {}


def busy(device, cpu_times):
    """Returns {name: a faster setting} if other programs leave a single process fewer CPUs than it has threads.

    The threads wait for each other at the end of every operation, each on a CPU that another program could use.
    """
    free, n_threads = machine.free_cpus(cpu_times), torch.get_num_threads()
    n = max(1, round(min(free, n_threads)))
    if device.type != "cpu" or parallel.world_size() > 1 or "OMP_WAIT_POLICY" in os.environ or n == n_threads:
        return {}
    return {
        "busy": f"other programs leave {free:.1f} CPUs for {n_threads} threads: faster now with "
        f"OMP_WAIT_POLICY=passive python train.py ..., bit for bit the same, or with OMP_NUM_THREADS={n}"
    }


def dtype(config, device):
    chosen, native = machine.choose_dtype(config.dtype, device), machine.choose_dtype("auto", device)
    why = "as requested"
    if config.dtype == "auto":
        why = "native here" if chosen == torch.bfloat16 else "bfloat16 is not native here"
    elif chosen == torch.bfloat16 != native and device.type != "mps":
        why = f"as requested, but emulated here, and slow: expected --dtype={native}".replace("torch.", "")
    return f"{chosen} ({why})".removeprefix("torch.")


def loss(config, device):
    if config.sampled_softmax:
        return f"logits of the targets and {config.sampled_softmax:,} other tokens"
    if n_chunks := loss_chunks(config):
        slow = device.type == "cuda" and triton_obstacle()
        without = f", in PyTorch's operations, as Triton does not run here: {slow}" if slow else ""
        return f"logits and loss in {several(n_chunks, 'chunk')}{without}"
    return f"all logits at once ({'they are few' if config.loss_chunks == 'auto' else 'as requested'})"


def loss_chunks(config):
    n_logits = math.ceil(config.padded_vocab_size / parallel.mesh().sizes.tensor)
    return count_chunks(config.loss_chunks, count_tokens(config, parallel.world_size()), n_logits, config.n_embd)


def float8(config, device):
    if device.type == "cpu":
        return "blocks (emulated here, and slow)"
    in_bfloat16 = machine.choose_dtype(config.dtype, device) == torch.bfloat16
    by_exponentials = in_bfloat16 and loss_chunks(config) and not triton_obstacle()
    return "blocks and logits" if by_exponentials else "blocks"
