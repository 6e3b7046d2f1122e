"""Keeps a run within the memory that there is: chooses the micro-batch, warns, and explains where it ran out.

predict.py says what a step needs; what fits is tried in a process of its own (measure.py trial), which leaves nothing.
"""

import bisect
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from lab import predict
from nanoladder import machine, parallel
from nanoladder.config import check
from nanoladder.data.datasets import find_folder, read_meta
from nanoladder.errors import BadInput

ROOT = Path(__file__).parents[2]
PARTS = ("weights", "gradients", "optimizer", "inputs", "activations", "temporary")  # of a peak
settled = {}  # the micro_batch_size that auto found for this run, by its key
MARGIN = 0.1  # of the memory stays free: for kernels' own needs, fragments, and what the prediction does not know


def settle(config, device, chosen):
    """The config with micro_batch_size a number; what was chosen and why is added to `chosen`.

    On a CPU, where running out of memory ends the process without a word, warns if a step may not fit.
    """
    if config.memory_gb and device.type == "cuda":
        machine.limit_memory(device, config.memory_gb * 1e9)
    if config.micro_batch_size == "auto":
        size, chosen["micro"] = parallel.from_first(lambda: largest_micro_batch(config, device))
        settled["micro_batch_size"] = size
        return dataclasses.replace(config, **settled)
    if device.type == "cpu" and parallel.rank() == 0:
        warn(config, device)
    return config


def available(config, device):
    """Bytes that a step's tensors may take: memory_gb, or this process's part of what is free on the device."""
    return config.memory_gb * 1e9 or machine.free_memory(device)


def largest_micro_batch(config, device):
    """(the largest micro_batch_size whose trial fits, why). Raises MemoryError if not one sequence fits.

    Starts from the prediction. A trial that runs out of memory is followed by the next smaller divisor of this
    process's share of the batch, one that leaves room (compiled steps need less than predicted) by the next larger.
    """
    there = available(config, device)
    world_size = parallel.world_size()
    sizes = predict.divisors(config.batch_size // world_size)
    predicted = predicted_micro_batch(config, device, there)
    if world_size > 1 and config.shard != "none":  # no process could try it alone
        if not predicted:
            raise MemoryError("micro_batch_size=auto: not one sequence is predicted to fit")
        return predicted, f"{predicted} at a time, predicted to be the most that fits into {gb(there)}"
    index = max(0, bisect.bisect(sizes, predicted) - 1)
    taken = trial(config, sizes[index], device, there)
    if taken:
        while index + 1 < len(sizes) and taken * sizes[index + 1] / sizes[index] < (1 - MARGIN) * there:
            if not (more := trial(config, sizes[index + 1], device, there)):
                break
            index, taken = index + 1, more
    while not taken:
        if index == 0:
            raise MemoryError(f"micro_batch_size=auto: not one sequence fits into {gb(there)}")
        index -= 1
        taken = trial(config, sizes[index], device, there)
    why = "the most that fits" if index + 1 < len(sizes) else "all of the batch"
    return sizes[index], (
        f"{sizes[index]} at a time, {why}: a trial took {gb(taken)} of {gb(there)}, of which {MARGIN:.0%} stay free"
    )


def trial(config, size, device, there):
    """Bytes that two steps of micro-batches of a size take in a process of its own; None if they do not fit."""
    print(f"micro_batch_size=auto: trying {size}", flush=True)
    share = config.batch_size // parallel.world_size()
    keys = dataclasses.asdict(config) | {
        "micro_batch_size": size,
        "batch_size": min(2 * size, share),  # the second micro-batch finds the gradients of the first
        "device": str(device),
        "memory_gb": (1 - MARGIN) * there / 1e9,
        **{"stage": "", "num_workers": 0, "batch_warmup_steps": 0, "shard": "none"},
    }
    words = ["-m", "lab.measure", "trial", *(f"--{key}={value}" for key, value in keys.items())]
    alone = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    alone["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), alone.get("PYTHONPATH")]))
    process = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=alone)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])["bytes"]
    if process.returncode < 0 or machine.out_of_memory(process.stderr):  # the system may have killed it
        return None
    reason = (process.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
    raise BadInput(f"micro_batch_size=auto: the trial of {size} failed: {reason}; expected a step that runs")


def warn(config, device):
    """Prints a line if a step is predicted not to fit; the prediction, of a second, only where it may be so."""
    there = available(config, device)
    if rough(config, parallel.world_size()) < there / 4:
        return
    peak = predicted_peak(config, device)
    if not there < peak < math.inf:
        return
    changes = (f"--{key}={value}" for key, value, less in savings(config, device, there) if less < there)
    advice = f"; {change} is predicted to fit" if (change := next(changes, None)) else ""
    print(
        f"warning: a step is predicted to take {gb(peak)} where {gb(there)} are free: the system may end this run "
        f"without a word{advice}",
        file=sys.stderr,
    )


def rough(config, world_size):
    """Bytes of a step by arithmetic alone: weights, gradients, and most of what a forward keeps."""
    one = predict.of_one_process(config, world_size)
    n_params = 12 * one.n_layer * one.n_embd**2 + (one.vocab_size + one.context_length) * one.n_embd
    n_blocks = one.n_layer if one.checkpointing == "none" else 1
    logits = 4 * one.micro_batch_size * one.context_length * one.vocab_size // max(1, one.loss_chunks)
    return 8 * n_params + n_blocks * predict.block_activations(one) + logits


@contextlib.contextmanager
def explained(config):
    """Where memory runs out, ends the program with what took it and what to change next; exit code 3."""
    device = machine.choose_device(config.device)
    free = available(config, device) if device.type == "cpu" else 0  # before anything is taken
    settled.clear()
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if not machine.out_of_memory(reason):
            raise
        traceback.clear_frames(error.__traceback__)  # the model and its step go
    text = f"error: out of memory: {reason}"
    if not (parallel.world_size() > 1 and parallel.said_before("error: out of memory")):
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                device = torch.device("cuda", torch.cuda.current_device())
            text = explanation(config, device, free or available(config, device), text)
        except RuntimeError as another:
            if not machine.out_of_memory(str(another)):
                raise
            text += "; not even CUDA's context fits: end what else runs on the GPU, or choose another --device"
        print(text, file=sys.stderr)
    sys.exit(3)


def explanation(config, device, there, text):
    """What the peak of a step is made of, what to change in the order of cost, and where the run can go on from."""
    meta = read_meta(find_folder(config.dataset), config.vocab_size)
    if config.micro_batch_size == "auto":
        config = dataclasses.replace(config, **({"micro_batch_size": 1} | settled))
    config = dataclasses.replace(config, vocab_size=meta["vocab_size"])
    lines = [text]
    if (peak := predicted_peak(config, device)) < math.inf:
        eager = " if not compiled" * config.compile
        there_is = f"{gb(there)} that it can have on {device}"
        lines.append(f"A step is predicted to take {gb(peak)}{eager} of the {there_is}: {anatomy(config, device)}.")
    if peak < there:
        lines.append("That should fit: something else may have taken memory, or what is free lies in fragments.")
    table = [(f"--{key}={value}", peak) for key, value, peak in savings(config, device, there)]
    if table:
        lines.append("What to change, the cheapest first, with the peak that it alone is predicted to leave:")
    first = next((words for words, less in table if less < (1 - MARGIN) * there), None)
    for words, less in table:
        lines.append(f"  {words:<26}{gb(less):>9}{'  the first that fits' * (words == first)}")
    if table and not first:
        lines.append("None of them fits alone; take several, or a smaller model or context_length.")
    last = Path(config.out_dir, "last.pt")
    if last.exists():
        lines.append(f"{last}, the last checkpoint, is intact: --init_from=resume goes on from it.")
    return "\n".join(lines)


def anatomy(config, device):
    """The parts of the predicted peak, as text."""
    memory = predict.predict_memory(config, device.type, parallel.world_size())
    parts = {part: getattr(memory, part) for part in PARTS}
    if sum(parts.values()) > 1.001 * memory.peak:  # dropped between steps, they are a part of what is temporary
        del parts["gradients"]
    return ", ".join(f"{part} {gb(size)}" for part, size in parts.items())


def savings(config, device, there):
    """Yields (key, value, predicted peak) of what saves a hundredth at least and is not on, the cheapest first."""
    world_size = parallel.world_size()
    now = predicted_peak(config, device)
    half = machine.choose_dtype("auto", device) != torch.float32
    changes = {
        ("set_to_none", True): not config.set_to_none,
        ("attention", "sdpa"): config.attention == "matmul",
        ("dtype", "auto"): config.dtype == "float32" and half,
        ("loss_chunks", 8): config.loss_chunks == 0,
        ("micro_batch_size", smaller_micro_batch(config, device, there)): True,
        ("shard", "full"): world_size > 1 and config.shard != "full",
        ("checkpointing", "every:1"): config.checkpointing == "none",
        ("optimizer", "adamw8bit"): config.optimizer == "adamw",
    }
    for (key, value), helps in changes.items():
        changed = dataclasses.replace(config, **{key: value})
        if helps and changed != config and goes_together(changed):
            peak = predicted_peak(changed, device)
            if peak < 0.99 * now:
                yield key, value, peak


def goes_together(config):
    try:
        check(config)
    except BadInput:
        return False
    return True


def smaller_micro_batch(config, device, there):
    """The largest micro-batch below the present one that is predicted to fit; 1 if none is."""
    world_size = parallel.world_size()
    now = predict.of_one_process(config, world_size).micro_batch_size
    fitting = predicted_micro_batch(config, device, there)
    sizes = [
        size for size in predict.divisors(config.batch_size // world_size) if size < now and size <= max(1, fitting)
    ]
    return sizes[-1] if sizes else config.micro_batch_size


def predicted_peak(config, device):
    """Bytes; infinitely many where the optimizer is not there to be asked."""
    try:
        return predict.predict_memory(config, device.type, parallel.world_size()).peak
    except BadInput:
        return math.inf


def predicted_micro_batch(config, device, there):
    """The largest micro-batch that is predicted to fit, 0 if none is; where nothing can be, this process's share."""
    world_size = parallel.world_size()
    try:
        return predict.largest_micro_batch(config, (1 - MARGIN) * there, device.type, world_size)
    except BadInput:
        return config.batch_size // world_size


def gb(size):
    return f"{size / 1e9:.3f} GB"
