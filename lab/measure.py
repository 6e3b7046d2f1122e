"""What one process measures: python measure.py machine|examine|curve|time|silent|limits|trial config/x.py

Each measurement prints one line of JSON. All of them train with train.py's own train_step on real batches.
"""

import contextlib
import dataclasses
import json
import math
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import train
from lab import predict
from lab.anatomy import anatomy, product_dtype, seconds_by_kind
from lab.limits import describe, limits
from nanoladder import machine, parallel
from nanoladder.config import load_config
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput
from nanoladder.run import report

WARMUP = 2  # steps before the clock starts: the first compiles, both touch memory for the first time
COMPARED = 5  # steps whose losses are compared with naive's
WINDOW = 1.0  # seconds that are timed at least
POINTS = 50  # of a curve of losses


def main(argv):
    parser = Parser(prog="measure.py", allow_abbrev=False)
    parser.add_argument("what", choices=["machine", "limits", "examine", "curve", "time", "silent", "trial"])
    parser.add_argument("--steps", type=int, default=4, help="timed at least")
    parser.add_argument("--threads", type=int, help="of each process")
    parser.add_argument("--trace", help="folder for a Chrome trace, and a snapshot of CUDA's memory")
    options, config_argv = parser.parse_known_args(argv)
    # The learning rate rises to its height within the steps that are compared: a wrong update shows in their losses.
    schedule = ["--max_steps=1000000", f"--warmup_steps={COMPARED}"] if options.what != "curve" else []
    config = load_config([*config_argv, *schedule])
    try:
        with machine.compiler_errors():
            match options.what:
                case "machine":
                    measured = describe(train.set_up(config))
                case "limits":
                    measured = limits(train.set_up(config))
                case "examine":
                    measured = examine(config, options.trace)
                case "curve":
                    measured = curve(config)
                case "time":
                    measured = time_steps(config, options.steps, options.threads)
                case "silent":
                    measured = time_without_communication(config, options.steps, options.threads)
                case "trial":
                    measured = trial(config)
    except torch.OutOfMemoryError:
        sys.exit("error: out of memory")
    print(json.dumps(measured))
    parallel.stop()


class Run:
    """A run as train.py sets it up, of which only steps are taken."""

    def __init__(self, config, threads=None):
        self.device = train.set_up(config)
        self.clock = report.StepClock(self.device)
        if threads:
            torch.set_num_threads(threads)
        meta, split, self.val_split = train.open_dataset(config.dataset, config.vocab_size, config.context_length)
        self.config = dataclasses.replace(config, vocab_size=meta["vocab_size"])
        self.resident_before = resident_bytes("VmRSS")
        self.model, self.optimizer = train.build(self.config, self.device)
        machine.choices(self.config, self.device)  # refuses what cannot run here
        self.batches = enumerate(train.training_batches(split, self.config, 0, self.device), 1)

    def step(self):
        """Takes the next step and returns its loss, which may be on the device."""
        with record_function("data wait"):
            number, batch = next(self.batches)
        lr = train.learning_rate(number, self.config)
        with record_function("step"):
            return train.train_step(self.model, self.optimizer, batch, lr, self.config)[0]

    def agreed(self, seconds):
        """The mean over the processes: all take the same number of steps."""
        return float(parallel.mean(torch.tensor(seconds, device=self.device)))

    def seconds(self, steps, window=WINDOW):
        """Mean seconds of the next steps, of more if that many take less than the window.

        The clock is read at both ends only, when the device has finished: a host that runs ahead gains.
        """
        start = self.clock.synchronize()
        for _ in range(steps):
            self.step()
        elapsed = self.agreed(self.clock.synchronize() - start)
        return elapsed / steps if elapsed >= window else self.seconds(math.ceil(1.2 * steps * window / elapsed))


def time_steps(config, steps, threads):
    """Seconds of a step after the warm-up and of the first one, and the peak of resident memory above the start's."""
    this = Run(config, threads)
    first = this.seconds(1, window=0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak, which may be the compiler's
    this.seconds(WARMUP - 1, window=0)
    seconds = this.seconds(steps)
    peak = resident_bytes("VmHWM")
    return {
        "seconds": seconds,
        "first_step_seconds": first,
        "resident_bytes": peak and peak - this.resident_before,
        "tokens": config.batch_size * config.context_length,
    }


def curve(config):
    """The losses of the config's whole run, each the mean of a POINTS-th of its steps, and the last validation loss.

    A run whose loss is not finite ends there, with no such loss and no validation loss.
    """
    this = Run(config)
    width = math.ceil(config.max_steps / POINTS)
    learning_rate = max(train.learning_rate(step, config) for step in range(1, config.max_steps + 1))
    found = {"learning_rate": learning_rate, "tokens": [], "losses": [], "val_loss": None}
    for start in range(0, config.max_steps, width):
        steps = min(width, config.max_steps - start)
        loss = float(sum(this.step() for _ in range(steps))) / steps
        if not math.isfinite(loss):
            return found
        found["tokens"].append((start + steps) * config.batch_size * config.context_length)
        found["losses"].append(loss)
    val_loss = train.evaluate(this.model, this.val_split, this.config, this.device)
    return found | {"val_loss": val_loss if math.isfinite(val_loss) else None}


def time_without_communication(config, steps, threads):
    """Seconds of a step whose gradients stay each process's own, and the bytes of gradients that it would average."""
    sent = {}

    def keep(_, bucket):
        sent[bucket.index()] = bucket.buffer().nbytes  # of one step
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    this = Run(config, threads)
    this.model.register_comm_hook(None, keep)
    this.seconds(WARMUP, window=0)
    sent.clear()  # the first step had other buckets
    return {"seconds": this.seconds(steps), "bytes": sum(sent.values())}


def trial(config):
    """The peak of the bytes that two steps take, where no more than config.memory_gb can be had."""
    machine.limit_memory(machine.choose_device(config.device), config.memory_gb * 1e9)
    this = Run(config)
    this.seconds(WARMUP, window=0)
    if this.device.type == "cuda":
        return {"bytes": torch.cuda.max_memory_reserved(this.device)}
    peak = resident_bytes("VmHWM") or report.peak_memory_gb(this.device) * 1e9
    return {"bytes": peak - (this.resident_before or 0)}


def examine(config, trace=None):
    """The first losses, the memory that the second step takes, and where the time of the last one goes."""
    on_gpu = machine.choose_device(config.device).type == "cuda"
    torch._inductor.config.cpp.enable_kernel_profile = not on_gpu  # compiled CPU kernels show up by name
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory_profiler:
        this = Run(config)
        losses = [float(this.step()) for _ in range(WARMUP - 1)]
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(this.device)  # without what the compiler tried out
        losses.append(float(this.step()))
    memory = anatomy(this, memory_profiler)
    losses += [float(this.step()) for _ in range(COMPARED - WARMUP - 1)]

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, record_shapes=True) as profiler:
        start = this.clock.synchronize()
        losses.append(float(this.step()))
        seconds = this.clock.synchronize() - start
    if trace:
        keep_trace(this, profiler, Path(trace))
    found = {
        "losses": losses,
        "memory": memory,
        "seconds_by_kind": seconds_by_kind(profiler.events(), this.config, on_gpu),
        "profiled_seconds": seconds,
        "product_dtype": product_dtype(this.config, this.device),
        "parameters": this.model.n_params(),
        "flops_per_token": this.model.flops_per_token(),
        "attention_kernel": machine.attention_kernel(this.config, this.device),
    }
    with contextlib.suppress(BadInput):  # the 8-bit states of bitsandbytes cannot be predicted
        found["predicted"] = predict.predict_memory(this.config, this.device.type).peak
    return found


def keep_trace(this, profiler, folder):
    """Writes trace.json.gz for a browser's tracing page, and on CUDA memory.pickle of one more step."""
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    if this.device.type == "cuda":
        torch.cuda.memory._record_memory_history()
        this.step()
        torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))


def resident_bytes(field):
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM); None where there is no /proc."""
    with contextlib.suppress(OSError):
        return machine.proc_bytes("/proc/self/status", field)


if __name__ == "__main__":
    run_script(main)
