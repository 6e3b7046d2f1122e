"""Measurements: functions of a config, each called in a separate process (launch.py), or from a command line:

    python -m lab.measure.measurements MEASUREMENT config/x.py [--key=value ...]

prints its figures as a line of JSON; "time" one after every turn, and reads how long the next is to take (seconds,
or null). All training is train.py's own train_step on real batches.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import train
from lab.measure.breakdown import allocated, memory_by_part, product_format, seconds_by_kind
from lab.measure.launch import reason
from lab.measure.traffic import Counter
from lab.predict import devices
from model import IGNORE
from nanoladder import data, machine, parallel
from nanoladder.arithmetic import flops_per_token, predict_bubble, share_of_process
from nanoladder.config import Config
from nanoladder.entry import run_script
from nanoladder.run import load_config
from nanoladder.run.clock import synchronized_time

WARMUP = 2  # steps before the clock starts: the first compiles, the second captures a CUDA graph; both touch new memory
COMPARED = 5  # number of steps whose losses are compared with naive's
HIGHEST_RATE = 1e-3  # of those steps
WINDOW = 0.5  # seconds to time
LEAD = 0.1  # of the seconds of a turn: steps before its clock starts, if so many fit


def main(argv):
    measurement, *words = argv
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer

    def turn(figures):
        print(json.dumps(figures), file=answers, flush=True)
        return json.loads(sys.stdin.readline() or "null")

    try:
        options = {"turn": turn} if measurement == "time" else {}
        figures = MEASUREMENTS[measurement](load_config(words), **options)
        print(json.dumps(figures), file=answers, flush=True)
    except Exception as error:
        sys.exit(f"error: {reason(error)}")


class Loop:
    """The training loop of train.py, set up from a config and advanced step by step."""

    def __init__(self, config: Config, threads: int | None = None) -> None:
        self.device = train.set_up(config)
        if threads:
            torch.set_num_threads(threads)
        self.dataset = data.open_dataset(config)
        self.config = config = dataclasses.replace(config, vocab_size=self.dataset.vocab_size)
        machine.check(config, self.device)
        self.resident_before = resident_before()
        torch._inductor.config.cpp.enable_kernel_profile = True  # profiles name compiled kernels; all compile one code
        self.model = train.build_model(config, self.device)
        self.optimizer = train.build_optimizer(self.model, config)
        self.scaler = train.build_scaler(config, self.device)
        self.batches = enumerate(train.training_batches(self.dataset.train, config, 1, self.device), 1)

    def step(self) -> Any:
        """Takes the next step. Returns its loss, which may be a tensor on the device."""
        with record_function("data wait"):
            number, batch = next(self.batches)
        lr = train.learning_rate(number, self.config)
        with record_function("step"):
            loss, _ = train.train_step(self.model, self.optimizer, self.scaler, batch, lr, self.config)
        return machine.double(loss) if torch.is_tensor(loss) else loss  # sums of losses are exact enough

    def val_digest(self):
        """A digest of the tokens on which the validation loss is measured."""
        digest = hashlib.sha256()
        for batch in data.ValidationBatches(self.dataset.val, self.config):
            digest.update(batch.targets[batch.targets != IGNORE].numpy().tobytes())
        return digest.hexdigest()[:8]


class Clock:
    """Times the steps of a loop that reports the end of each, in turns.

    turn(figures): hands over the seconds of a step, and how many per second this process waited for a core. It waits,
    and returns how many seconds to time next, or None at the end (default: WINDOW, once). WARMUP steps come before the
    first turn, and every turn has at least one. The clock is read when the device has finished; in between, a host may
    run ahead.
    """

    def __init__(self, device: torch.device, turn: Callable | None = None) -> None:
        requests = iter([WINDOW, None])
        self.device, self.turn = device, turn or (lambda figures: next(requests))
        self.losses = []  # of the first COMPARED steps: numbers, or tensors on the device

    def start(self, resident: int | None = None) -> None:
        """Starts the clock, after all imports. resident: bytes before anything was built, if that was not now."""
        self.resident_before, self.times = resident or resident_before(), {}
        self.phases = self.measure()
        self.next(None)

    def step(self, loss: Any) -> bool:
        """Counts a step that has ended, and its loss. Returns True if it was the last one."""
        if len(self.losses) < COMPARED:
            self.losses.append(loss)
        self.left -= 1
        return not self.left and self.next((synchronized_time(self.device) - self.started) / self.steps)

    def next(self, seconds):
        """Ends some steps, each of which took these seconds, and begins the next. Returns True if there are none."""
        try:
            self.left = self.steps = self.phases.send(seconds)
        except StopIteration:
            return True
        self.started = synchronized_time(self.device)
        return False

    def measure(self):
        """Yields numbers of steps to take, and is sent the seconds of each."""
        self.times["first_step_seconds"] = yield 1
        machine.reset_peak_memory(self.device)  # it may be the compiler's
        self.times["seconds"] = yield WARMUP - 1
        share = 0.0
        while (request := self.turn({"seconds": self.times["seconds"], "waited": share})) is not None:
            seconds = torch.tensor(self.times["seconds"], device=self.device)
            seconds = float(parallel.all_reduce_mean(seconds))  # so that all processes take the same number of steps
            if lead := int(LEAD * request / seconds):  # after others' turns, caches are cold and batches wait
                yield lead
            n, before = max(1, round(request / seconds)), waited()
            self.times["seconds"] = yield n
            share = (waited() - before) / (n * self.times["seconds"])

    def figures(self) -> dict:
        """Seconds of a step and of the first one, and peak resident memory above the start's."""
        peak = resident_bytes("VmHWM")
        return self.times | {"resident_bytes": peak and peak - self.resident_before}


def compared(config):
    """Returns a config for comparing losses: within these steps the learning rate reaches its peak, so a fault shows.

    The peak is at most HIGHEST_RATE: at Muon's rate AdamW's losses rise, and then 8 bits of its state differ by more
    than a fault does.
    """
    rate = min(config.learning_rate, HIGHEST_RATE)
    return dataclasses.replace(config, max_steps=1_000_000, warmup_steps=COMPARED, learning_rate=rate, min_lr=0.0)


def time_steps(config: Config, turn: Callable | None = None, threads: int | None = None) -> dict:
    """Trains in turns (Clock). Returns the figures of the clock, and the tokens of a step."""
    loop = Loop(compared(config), threads)
    clock = Clock(loop.device, turn)
    clock.start(loop.resident_before)
    while not clock.step(loop.step()):
        pass
    return clock.figures() | {"tokens": config.batch_size * config.context_length}


def curve(config):
    """Trains the whole run. Returns its peak learning rate, tokens, last losses and final validation loss.

    A run whose loss is not finite has no validation loss.
    """
    loop = Loop(config)
    losses = [loop.step() for _ in range(config.max_steps)]
    val_loss = train.evaluate(loop.model, loop.dataset.val, loop.config, loop.device)
    return {
        "learning_rate": max(train.learning_rate(step, config) for step in range(1, config.max_steps + 1)),
        "tokens": config.max_steps * config.batch_size * config.context_length,
        "loss": float(losses[-1]),
        "val_loss": val_loss if math.isfinite(val_loss) else None,
        "val_data": loop.val_digest(),
    }


def exchange(config, threads=None):
    """Returns {kind of message: [number, bytes]} sent by this process in a step, and the peak bytes of all tensors.

    The peak is the highest of any process; on a CPU it includes messages kept by gloo's threads. For a pipeline, also
    returns its predicted bubble: the share of a step in which a process waits. The counted step is not compiled.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop = Loop(compared(config), threads)
        for _ in range(WARMUP):
            loop.step()
    if loop.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(loop.device)
    else:
        peak = max(now for _, now in allocated(profiler, on_gpu=False))
    with Counter() as counter:
        loop.step()
    figures = {"sent": dict(counter.sent), "peak": max(parallel.gather_objects(peak))}
    if (n := parallel.mesh().sizes.pipeline) > 1:
        share = share_of_process(config, parallel.world_size())
        figures["bubble"] = predict_bubble(config.pipeline_schedule, n, share.batch_size // share.micro_batch_size)
    return figures


def profile_step(config: Config) -> dict:
    """Losses of the first COMPARED steps, the memory of step WARMUP by part, and the time of the last step by kind.

    The first step compiles: no process of this row has done so before.

    A CUDA graph is captured in step WARMUP: the allocator sees no memory in the steps that replay it.
    """
    on_gpu = machine.choose_device(config.device).type == "cuda"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory_profiler:
        loop = Loop(compared(config))
        start = synchronized_time(loop.device)
        losses = [float(loop.step()) for _ in range(WARMUP - 1)]
        first = synchronized_time(loop.device) - start
        if on_gpu:
            torch.cuda.empty_cache()
            machine.reset_peak_memory(loop.device)  # the compiler's trials do not count
        losses.append(float(loop.step()))
    memory = memory_by_part(loop, memory_profiler)
    losses += [float(loop.step()) for _ in range(COMPARED - WARMUP - 1)]

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, record_shapes=True) as profiler:
        start = synchronized_time(loop.device)
        losses.append(float(loop.step()))
        seconds = synchronized_time(loop.device) - start
    return {
        "losses": losses,
        "first_step_seconds": first,
        "memory": memory,
        "seconds_by_kind": seconds_by_kind(profiler.events(), loop.config, on_gpu),
        "profiled_seconds": seconds,
        "product_dtype": product_format(loop.config, loop.device),
        "parameters": loop.model.n_params,
        "flops_per_token": flops_per_token(loop.model.config),
        "attention_kernel": machine.attention_kernel(loop.config, loop.device),
    }


def waited() -> float:
    """Seconds that the threads of this process were ready to run but had no core; 0 where the system doesn't count."""
    seconds = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            seconds += int(path.read_text().split()[1]) / 1e9
    return seconds


def resident_before() -> int | None:
    """Resident bytes before a loop is built, with the compiler loaded: a new process would load it later."""
    import torch._inductor.compile_fx  # noqa: F401

    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int | None:
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM), less files mapped now; None if not known.

    Mapped files, such as libraries, are left out because a fork starts without those that its parent has touched.
    """
    with contextlib.suppress(OSError):  # no /proc, or one without these fields
        rss, files = (machine.proc_bytes("/proc/self/status", name) for name in (field, "RssFile"))
        return rss - files


def machine_facts(config: Config) -> dict:
    """The machine: its processor, device and versions."""
    return devices.describe(train.set_up(config))


def free_memory(config):
    """Bytes that processes can still allocate on the config's device."""
    return machine.free_memory(machine.choose_device(config.device))


def machine_limits(config):
    """Measures the limits of the machine (devices.py)."""
    return devices.limits(train.set_up(config))


MEASUREMENTS = {  # the names under which runs.jsonl keeps them
    "machine": machine_facts,
    "free": free_memory,
    "limits": machine_limits,
    "profile": profile_step,
    "time": time_steps,
    "exchange": exchange,
    "curve": curve,
}


if __name__ == "__main__":
    run_script(main)
