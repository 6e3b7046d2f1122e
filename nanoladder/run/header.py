"""Header of a run: the model, the data, the config's differences from the defaults, and each choice with its reason."""

import math
import os

import torch
import torch.distributed as dist

from nanoladder import machine, optim, parallel
from nanoladder.arithmetic import CUTS, count_parameters, count_tokens, flops_per_token
from nanoladder.config import differences
from nanoladder.run.size import describe_state, in_gb
from operators import count_chunks, triton_obstacle


def print_header(config, dataset, device, attention):
    """Prints the header, before the model is built. dataset: a Dataset. attention: describes its kernel."""
    tokens = config.batch_size * config.context_length
    flops = flops_per_token(config) * config.max_steps * tokens
    micro = f", {config.micro_batch_size} at a time" if config.micro_batch_size else ""
    changed = "  ".join(f"{key}={value}" for key, value in differences(config).items())
    lines = {
        "model": f"{count_parameters(config):,} parameters; {config.vocab_size:,} token ids",
        "memory": f"{describe_state(config)}; {in_gb(machine.free_memory(device))} are free",
        "data": f"{config.dataset}: {dataset.meta.get('tokenizer', 'unknown tokenizer')}",
        "step": f"{tokens:,} tokens = {config.batch_size} sequences × {config.context_length}{micro}",
        "run": f"{config.max_steps:,} steps, {flops:.3g} FLOP",
        "config": changed or "all defaults",
        **choices(config, device, attention),
    }
    print_lines(lines)


def print_lines(lines):
    """Prints lines of the header, {name: text}."""
    for name, text in lines.items():
        print(f"{name:<9} {text}")


def counting(losses, bits_per_nat):
    """Returns {name: the losses of counted predictions}: what a model has to fall below to know more than a table."""
    unit = "bits per byte" if bits_per_nat else "nats per token"
    text = ", ".join(f"{name} {loss * (bits_per_nat or 1):.3f}" for name, loss in losses.items())
    return {"counting": f"{text} {unit}"} if losses else {}


def choices(config, device, attention):
    """Returns {name: choice made on this machine and its reason}."""
    chosen = {
        "device": machine.device_name(device),
        "dtype": dtype(config, device),
        "attention": attention,
        "loss": loss(config, device),
        "optimizer": optimizer(config),
        "compile": "off",
    }
    if config.compile:
        chosen["compile"] = "each block" if config.compiles_blocks else "the model"
    if config.cuda_graph:
        reason = machine.capture_obstacle(config, device)
        chosen["graph"] = f"none: {reason}" if reason else "a CUDA graph of each step's forward and backward"
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
        why = "bfloat16 is native here" if chosen == torch.bfloat16 else "bfloat16 is not native here"
    elif chosen == torch.bfloat16 != native and device.type != "mps":
        why = f"as requested, but emulated here, and slow: expected --dtype={native}".replace("torch.", "")
    return f"{chosen} ({why})".removeprefix("torch.")


def loss(config, device):
    n_tokens = count_tokens(config, parallel.world_size())
    n_logits = math.ceil(config.padded_vocab_size / parallel.mesh().sizes.tensor)
    if n_chunks := count_chunks(config.loss_chunks, n_tokens, n_logits, config.n_embd):
        slow = device.type == "cuda" and triton_obstacle()
        without = f", in PyTorch's operations, as Triton does not run here: {slow}" if slow else ""
        return f"logits and loss in {n_chunks} chunks of tokens{without}"
    return f"all logits at once ({'the logits are small' if config.loss_chunks == 'auto' else 'as requested'})"


def optimizer(config):
    factor = optim.RELATIVE_LR.get(config.optimizer, 1.0)
    return config.optimizer + (f" at {factor:g} × the lr logged" if factor != 1 else "")
