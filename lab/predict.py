"""Predicts the memory of a training step (trace.py), the largest micro-batch that fits, and the cost of a run."""

import bisect
import dataclasses

from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from lab.trace import trace
from model import GPT
from nanoladder.data.batches import tokens_seen
from nanoladder.errors import BadInput
from nanoladder.run.memory import block_activations, divisors, product_dtype, share_of_process
from nanoladder.run.metrics import flops_per_token


def predict_memory(config, device_type="cpu", world_size=1):
    """Memory of a step in one of world_size processes.

    On "cuda" these are the bytes of torch.cuda.max_memory_allocated: neither CUDA's context (about 0.5 GB) nor memory
    that the allocator caches. Without a GPU to ask, it counts as Hopper or Blackwell. A compiled step counts as the
    compiler fuses it for a CPU, on "cuda" without buffers updated in place; CUDA graphs and autotuned products are left
    out. Raises BadInput
    if the config leaves the step open or the optimizer's package is missing.
    """
    if device_type not in ("cpu", "cuda"):
        raise BadInput(f"device={device_type}: memory is predicted for cpu and cuda")
    if config.vocab_size == 0:
        raise BadInput("vocab_size=0: memory depends on it; expected a number, such as --vocab_size=50257")
    if config.micro_batch_size == "auto":
        raise BadInput("micro_batch_size=auto: only training finds it; expected a number, such as --micro_batch_size=8")
    if config.batch_size % world_size:
        raise BadInput(
            f"batch_size={config.batch_size} does not divide among world_size={world_size} processes; "
            f"expected a multiple of {world_size}"
        )
    config = share_of_process(config, world_size)
    accumulates = config.micro_batch_size < config.batch_size
    ddp_buckets = world_size > 1 and config.shard == "none"  # hold the gradients from step to step
    traced = dataclasses.replace(
        config,
        batch_size=config.micro_batch_size,
        set_to_none=config.set_to_none and not accumulates and not ddp_buckets,
        dtype=product_dtype(config, device_type),
        # Fields that allocate nothing, or cannot be traced: configs that differ in them share a trace.
        **{"stage": "", "lazy_metrics": True, "num_workers": 0, "keep_memory": True, "matmul_precision": "highest"},
        **{"compile_mode": "default", "ddp": False},
    )
    memory = trace(traced, device_type)
    n_batches = 1 + (config.num_workers > 0)  # loader processes keep one ahead
    inputs = n_batches * config.batch_size // config.micro_batch_size * memory.inputs
    memory = dataclasses.replace(memory, inputs=inputs, peak=memory.peak + inputs - memory.inputs)
    return shard_memory(memory, config, world_size)


def shard_memory(memory, config, world_size):
    """Memory of one of world_size processes that share what config.shard says: an estimate.

    Each keeps its share of optimizer state, gradients and weights. For forward and backward weights are gathered: with
    shard=optimizer all of them, with full those outside blocks and of two blocks, of which one computes and the other
    is next.
    """
    if config.shard == "none" or world_size == 1:
        return memory
    outside = 4 * config.n_embd * (config.vocab_size + config.context_length)  # float32
    unsharded = min(outside + 2 * (memory.weights - outside) // config.n_layer, memory.weights)
    gathered = memory.weights if config.shard == "optimizer" else unsharded
    shares = {
        "weights": min(gathered + memory.weights // world_size, memory.weights),
        "gradients": unsharded + max(memory.gradients - unsharded, 0) // world_size,
        "optimizer": memory.optimizer // world_size,
    }
    saved = {part: getattr(memory, part) - size for part, size in shares.items()}
    resident = memory.weights + memory.gradients + memory.optimizer + memory.inputs + memory.activations
    if resident > memory.peak - memory.temporary:  # gradients are dropped between steps: none in the forward
        del saved["gradients"]
    return dataclasses.replace(memory, **shares, peak=memory.peak - sum(saved.values()))


def largest_micro_batch(config, memory_bytes, device_type="cpu", world_size=1):
    """The largest micro_batch_size whose predicted peak fits, of the divisors of a process's batch; 0 if none does."""
    sizes = [0, *divisors(config.batch_size // world_size)]

    def predict(index):
        sized = dataclasses.replace(config, micro_batch_size=sizes[index])
        return predict_memory(sized, device_type, world_size)

    low, high = 0, len(sizes) - 1
    most = predict(high)
    if most.peak <= memory_bytes:
        return sizes[high]
    peaks = {low: most.weights + most.gradients + most.optimizer, high: most.peak}
    while high - low > 1:  # sizes[low] fits, sizes[high] does not; between them the peak is nearly a straight line
        share = (memory_bytes - peaks[low]) / (peaks[high] - peaks[low])
        guess = bisect.bisect(sizes, sizes[low] + share * (sizes[high] - sizes[low])) - 1
        middle = min(max(guess, low + 1), high - 1)
        peaks[middle] = predict(middle).peak
        low, high = (middle, high) if peaks[middle] <= memory_bytes else (low, middle)
    return sizes[low]


def costs(config, mfu=0.4, peak_flops=989e12, world_size=1):
    """The cost of a run: {n_params, flops_per_token, tokens, pf_days, hours}.

    A PF-day is 86400·10¹⁵ FLOP. The hours are those of world_size devices at the share mfu of peak_flops each (FLOP/s;
    the default is an H100's or H200's in bfloat16).
    """
    with FakeTensorMode():
        model = GPT(config)
    n_params, flops = model.n_params, flops_per_token(model)
    tokens = tokens_seen(config.max_steps, config)
    return {
        "n_params": n_params,
        "flops_per_token": flops,
        "tokens": tokens,
        "pf_days": flops * tokens / (1e15 * 86400),
        "hours": flops * tokens / (mfu * peak_flops * world_size * 3600),
    }


def report(config, rows, device_type="cpu", memory_gb=0.0, mfu=0.4, peak_flops=989e12, world_size=1):
    """Text: the cost of the run, and a table of the memory of every row (name, config), whose vocab_size is known.

    With memory_gb (1e9 bytes) the table has the largest micro-batch that fits.
    """
    cost = costs(config, mfu, peak_flops, world_size)
    each = f" in each of {world_size} processes" if world_size > 1 else ""
    lines = [
        f"{cost['n_params'] / 1e6:.1f} M parameters, {cost['flops_per_token'] / 1e9:.3f} GFLOP a token",
        f"{cost['tokens'] / 1e9:.3f} G tokens in {config.max_steps} steps: {cost['pf_days']:.3g} PF-days, "
        f"{cost['hours']:.3g} hours at {mfu:.0%} of {world_size} × {peak_flops / 1e12:.0f} TFLOP/s",
        f"predicted GB of tensors on {device_type}{each} (formula: activations of a block, Korthikanti et al. 2022)",
        "",
    ]
    parts = ["weights", "gradients", "optimizer", "activations", "temporary", "peak"]
    table = [["stage", *parts, "B/param", "block MB", "formula MB"] + [f"fits {memory_gb:g} GB"] * (memory_gb > 0)]
    for name, row in tqdm(rows, unit="stage", leave=False):
        memory = predict_memory(row, device_type, world_size)
        formula = block_activations(share_of_process(row, world_size), device_type)
        cells = [
            name + "*" * (row.compile and device_type == "cuda"),
            *(f"{getattr(memory, part) / 1e9:.3f}" for part in parts),
        ]
        block = f"{memory.block / 1e6:.1f}" if memory.block else "-"
        cells += [f"{memory.peak / cost['n_params']:.1f}", block, f"{formula / 1e6:.1f}"]
        if memory_gb > 0:
            fitting = largest_micro_batch(row, memory_gb * 1e9, device_type, world_size)
            cells.append(f"{fitting} of {row.batch_size // world_size}" if fitting else "nothing")
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for stage, *cells in table:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([stage.ljust(widths[0]), *padded]))
    if device_type == "cuda" and any(row.compile for _, row in rows):
        lines.append("* compiled as for a CPU, with CUDA's attention, nothing in place; not compared with a GPU yet")
    return "\n".join(lines)
