"""Memory of a run: finds the largest micro-batch that fits, warns if a step may not fit, explains out-of-memory errors.

lab/advise.py predicts the memory of a step and lab/measure.py tries it, both in a child process, because this module
must not import the training step and because a child returns all its memory when it exits.
"""

import bisect
import contextlib
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from nanoladder import checkpoint, machine, parallel
from nanoladder.config import gathers_keys
from nanoladder.errors import BadInput
from nanoladder.kernels import count_chunks, count_scores, uses_blocks
from nanoladder.run.start import CONFIG, read_config

ROOT = Path(__file__).parents[2]
MARGIN = 0.1  # share of the memory left free for kernel workspaces, fragmentation and prediction error


# -- before training


def resolve_micro_batch(config, device):
    """Returns the config with a numeric micro_batch_size, the same in every process. vocab_size must be known.

    Given "auto", tries micro-batches in child processes and prints the choice and its reason. Given a number on a CPU,
    prints a warning if a step is predicted not to fit, because the system may kill the process without a message.
    Raises MemoryError if not even one sequence fits.
    """
    if config.memory_gb and device.type != "cpu":
        machine.limit_memory(device, config.memory_gb * 1e9)
    if config.micro_batch_size == "auto":
        before = size_before(config)
        size, reason = parallel.broadcast_from_first(lambda: find_micro_batch(config, device, before))
        changed = f"; before it was {before}" if before not in (None, size) else ""
        print(f"micro_batch_size={size}: {reason}{changed}", flush=True)
        return dataclasses.replace(config, micro_batch_size=size)
    if device.type == "cpu" and parallel.rank() == 0:
        warn_if_too_large(config, device)
    return config


def find_micro_batch(config, device, before=None):
    """Returns the largest micro_batch_size whose trial fits, and the reason as text. Raises MemoryError if none fits.

    Starts from the prediction and tries divisors of this process's share of the batch: the next smaller one while
    trials run out of memory, the next larger one while they leave room, as compiled steps often do. A resumed run
    keeps its size while that fits and twice the size does not: another size would add up gradients in another order.
    """
    available = available_bytes(config, device)
    grid = parallel.mesh().sizes
    sizes = parallel.micro_batch_sizes(config, grid)
    room = (1 - MARGIN) * available
    peak_of = functools.cache(lambda size: trial(config, size, device, available))
    # A single process cannot try a step of which it does a part
    in_parts = parallel.mesh().is_cut or parallel.mesh().n_sharing > 1 or grid.context > 1
    if before in sizes and not in_parts:
        peak = peak_of(before)
        if peak and (before == sizes[-1] or 2 * peak > room):
            return before, f"as before; a trial took {gb(peak)} of {gb(available)}"
    print("micro_batch_size=auto: predicting", flush=True)  # takes a minute for GPT-2
    predicted = ask("micro_batch_size", config, device, available).get("micro_batch_size")
    if in_parts:
        if predicted is None:
            return sizes[0], "the smallest: none is predicted, and steps of parts of the model are not tried"
        if predicted == 0:
            raise MemoryError(f"micro_batch_size=auto: not one sequence is predicted to fit into {gb(available)}")
        if before in sizes and before <= predicted < 2 * before:
            return before, f"as before; predicted to fit into {gb(available)}"
        return predicted, f"the most predicted to fit into {gb(available)}; steps of parts of the model are not tried"
    predicted = sizes[-1] if predicted is None else predicted
    index = max(0, bisect.bisect(sizes, predicted) - 1)
    peak = peak_of(sizes[index])
    if peak:
        while index + 1 < len(sizes) and peak * sizes[index + 1] / sizes[index] < room:
            if not (larger := peak_of(sizes[index + 1])):
                break
            index, peak = index + 1, larger
    while not peak:
        if index == 0:
            raise MemoryError(f"micro_batch_size=auto: not one sequence fits into {gb(available)}")
        index -= 1
        peak = peak_of(sizes[index])
    why = "the most that fits" if index + 1 < len(sizes) else "the whole batch of a process"
    return sizes[index], f"{why}; a trial took {gb(peak)} of {gb(available)}, of which {MARGIN:.0%} stay free"


def size_before(config):
    """The micro_batch_size of the run in out_dir that is to be resumed; None if there is none, or it is 0."""
    folder = Path(config.out_dir)
    if config.init_from in ("resume", "auto") and checkpoint.found(folder):
        return read_config(folder / CONFIG).get("micro_batch_size") or None


def trial(config, size, device, available):
    """Runs two steps with micro-batches of `size` in a child process. Returns the bytes they take, None if too many.

    Raises BadInput if they fail for another reason.
    """
    print(f"micro_batch_size=auto: trying {size}", flush=True)
    share = config.batch_size // parallel.mesh().sizes.data
    tried = dataclasses.replace(
        config,
        micro_batch_size=size,
        batch_size=min(2 * size, share),  # two micro-batches, so that gradients accumulate
        batch_warmup_steps=0,
        num_workers=0,
        device=str(device),
        memory_gb=(1 - MARGIN) * available / 1e9,
    )
    process = run_child("lab.measure", "trial", config=tried)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])["bytes"]
    if process.returncode < 0 or machine.is_out_of_memory(process.stderr):  # negative: killed by a signal
        return None
    reason = (process.stderr.strip().splitlines() or ["no error message"])[-1].removeprefix("error: ")
    raise BadInput(f"micro_batch_size=auto: the trial of {size} failed: {reason}; expected a step that runs")


def warn_if_too_large(config, device):
    """Prints one line if a step is predicted not to fit. Skips the prediction, which takes seconds, for small steps."""
    available = available_bytes(config, device)
    if estimate_peak(config, parallel.world_size()) < available / 4:
        return
    peak = ask("peak", config, device, available).get("peak", 0)
    if peak <= available:
        return
    savings = ask("savings", config, device, available).get("savings", [])
    change = next((f"; --{key}={value} is predicted to fit" for key, value, less in savings if less < available), "")
    print(
        f"warning: a step is predicted to take {gb(peak)}, and {gb(available)} are free: the system may kill this run "
        f"without an error message{change}",
        file=sys.stderr,
    )


# -- out of memory


def is_out_of_memory(error):
    """True if an exception reports that GPU, CPU or Python memory ran out; a compiler's says so in a later line."""
    compiling = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    text = f"{type(error).__name__}: {error}" if compiling else summary(error)
    return isinstance(error, RuntimeError | MemoryError) and machine.is_out_of_memory(text)


def explain(config, device, available, error):
    """Prints why memory ran out, the parts of a step's memory and what to change. Only one process prints.

    config: micro_batch_size may still be "auto" and vocab_size 0. available: bytes available to the run before it
    allocated any; 0 for the bytes free now. Releases the model's memory first, unless the caller holds references.
    """
    lines = [f"error: out of memory: {summary(error)}"]
    if parallel.world_size() > 1 and parallel.already_printed("error: out of memory"):
        return
    traceback.clear_frames(error.__traceback__)
    try:
        if device.type != "cpu":
            torch.get_device_module(device.type).empty_cache()
        available = available or available_bytes(config, device)
        lines += explanation(config, device, available)
    except RuntimeError as another:
        if not is_out_of_memory(another):
            raise
        lines[0] += "; not even the device's context fits: end other processes on the GPU, or choose another --device"
    print("\n".join(lines), file=sys.stderr)


def release(model, optimizer):
    """Frees the memory of a model that is still referred to, its gradients and its optimizer's state."""
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.untyped_storage().resize_(0)
        parameter.grad = None
    optimizer.state.clear()
    gc.collect()


def explanation(config, device, available):
    """Yields lines: the parts of a step's peak, what to change (cheapest first), the checkpoint to resume from.

    Omits the first two if the prediction fails for lack of memory or of the optimizer's package.
    """
    advice = ask("savings", config, device, available)
    if advice:
        peak, savings = advice["peak"], [(f"--{key}={value}", less) for key, value, less in advice["savings"]]
        parts = ", ".join(f"{part} {gb(size)}" for part, size in advice["parts"].items())
        eager = " if it is not compiled" * config.compile
        yield f"A step is predicted to take {gb(peak)}{eager}, of {gb(available)} available on {device}: {parts}."
        if peak < available:
            yield "That should fit: another process may have taken memory, or the free memory is fragmented."
        if savings:
            yield "What to change, cheapest first, each with the predicted peak of that change alone:"
        fits = next((change for change, less in savings if less < (1 - MARGIN) * available), None)
        for change, less in savings:
            yield f"  {change:<26}{gb(less):>9}{'  the first that fits' * (change == fits)}"
        if savings and not fits:
            yield "No single change is enough: combine several, or choose a smaller model or context_length."
    for path in checkpoint.found(Path(config.out_dir))[:1]:
        yield f"{path}, the newest checkpoint, is intact: --init_from=resume continues from it."


def summary(error):
    """Returns the type and the first line of an exception."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


# -- child processes


def ask(question, config, device, available):
    """Returns the answer of lab/advise.py, a dict, for steps that leave MARGIN of the memory free; {} if it fails.

    Ignores failures, because every caller can proceed without a prediction. Uses one thread and no GPU.
    """
    options = [f"--available_bytes={int((1 - MARGIN) * available)}", f"--world_size={parallel.world_size()}"]
    config = dataclasses.replace(config, device=str(device))
    with contextlib.suppress(OSError, MemoryError):  # too little memory even to start a process
        process = run_child("lab.advise", question, *options, config=config, OMP_NUM_THREADS="1")
        if process.returncode == 0:
            return json.loads(process.stdout.splitlines()[-1])
    return {}


def run_child(module, *words, config, **environment):
    """Runs `python -m module words --key=value ...` with every key of the config, outside torchrun's process group.

    -P keeps the working directory off sys.path, in case it contains another train.py.
    """
    keys = [f"--{key}={value}" for key, value in dataclasses.asdict(config).items()]
    alone = {name: value for name, value in child_environment().items() if name != "WORLD_SIZE"}
    command = [sys.executable, "-P", "-m", module, *words, *keys]
    return subprocess.run(command, env=alone | environment, capture_output=True, text=True)


def child_environment():
    """This process's environment variables, with this project's modules in reach."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


# -- arithmetic


def available_bytes(config, device):
    """Bytes that this process may allocate: memory_gb, or its share of the device's free memory."""
    return config.memory_gb * 1e9 or machine.free_memory(device)


def estimate_peak(config, world_size):
    """Lower estimate of a step's peak bytes, by arithmetic alone: weights, gradients and most activations."""
    own = share_of_process(config, world_size)
    n_params = 12 * own.n_layer * own.n_embd**2 + (own.vocab_size + own.context_length) * own.n_embd
    n_blocks = own.n_layer if own.checkpointing == "none" else 1
    n_tokens = count_tokens(config, world_size)
    n_chunks = count_chunks(own.loss_chunks, n_tokens, own.padded_vocab_size)
    logits = (2 if n_chunks else 4) * n_tokens * own.vocab_size // max(1, n_chunks)  # chunks may be in half precision
    return 8 * n_params + n_blocks * block_activations(own, world_size=world_size) + logits


def count_micro_batches(config, world_size):
    """Number of micro-batches into which one of world_size processes cuts its share of a batch."""
    own = share_of_process(config, world_size)
    return own.batch_size // own.micro_batch_size


def count_tokens(config, world_size):
    """Number of tokens in a forward of one of world_size processes: of its micro-batch, its part of each sequence."""
    parts = parallel.divide(config, world_size).context
    return share_of_process(config, world_size).micro_batch_size * config.context_length // parts


def block_activations(config, device_type="cpu", world_size=1):
    """Activation bytes that one block keeps for a micro-batch (Korthikanti et al. 2022, equation 2).

    In half precision with dropout: s·b·h·(34 + 5·a·s/h) bytes for s tokens, b sequences, width h and a heads. The 34
    and the 5 count two bytes per number and one byte per element of a dropout mask. Without dropout there are no masks,
    in float32 a number takes four bytes, fused attention drops the a·s/h term, and attention in blocks keeps little
    more than half of it. A real block keeps more under autocast, which has a float32 residual stream and also copies
    the weights, and less if it is recomputed.

    Each of the processes that share a sequence keeps its part, or, where it gathers them, the keys and values of all
    tokens. config: that of one process.
    """
    s, b, h, a = config.context_length, config.micro_batch_size or config.batch_size, config.n_embd, config.n_head
    dtype, mask = getattr(torch, product_dtype(config, device_type)), int(config.dropout > 0)
    number = dtype.itemsize
    linear = 16 * number + 2 * mask  # inputs of the norms, the matrix products and GELU
    quadratic = 0
    if config.attention == "matmul":
        quadratic = s * s * (number + mask * (number + 1))  # softmax, then its dropout
    elif uses_blocks(config, device_type, dtype):
        quadratic = number * count_scores(s, dtype)
    n = parallel.divide(config, world_size).context
    gathered = 2 * number * (n - 1) if gathers_keys(config) else 0
    return (s * b * h * (linear + gathered) + a * b * quadratic) // n


def product_dtype(config, device_type):
    """Name of the dtype of matrix products. On a GPU, "auto" counts as bfloat16; float16 has the same size."""
    if config.dtype != "auto":
        return config.dtype
    if device_type == "cuda":
        return "bfloat16"
    return str(machine.choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")


def share_of_process(config, world_size):
    """Returns the config with the batch_size and micro_batch_size of one of world_size processes."""
    grid = parallel.divide(config, world_size)
    micro_batch_size = parallel.micro_batch_size(config, grid)
    return dataclasses.replace(config, batch_size=config.batch_size // grid.data, micro_batch_size=micro_batch_size)


def divisors(n):
    """Divisors of n, ascending."""
    return [size for size in range(1, n + 1) if n % size == 0]


def gb(size):
    return f"{size / 1e9:.3f} GB"
