"""Takes one measurement, in a process of its own: python -m lab.measure MEASUREMENT config/x.py [--key=value ...]

Prints its figures as one line of JSON. All training is train.py's own train_step on real batches.

    machine   processor, device and versions
    limits    the most that the machine can do, in a matrix product and in a copy
    examine   the losses of the first steps, and where the memory and the time of a step go
    time      seconds of a step
    turns     losses of the first steps, and then seconds of a step whenever it is asked for them (turns.py)
    silent    seconds of a step in which processes do not communicate
    exchange  the messages that a process sends in a step, and the peak memory of the process with the highest
    curve     the losses of a whole training run
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import sys
from multiprocessing.connection import Client
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import train
from lab import predict
from lab.anatomy import allocated, anatomy, product_dtype, seconds_by_kind
from lab.limits import describe, limits
from lab.traffic import Counter
from model import IGNORE
from nanoladder import data, machine, parallel
from nanoladder.config import replays_graphs
from nanoladder.errors import BadInput
from nanoladder.run import load_config
from nanoladder.run.clock import synchronized_time
from nanoladder.run.failures import explain_compiler_failure
from nanoladder.run.memory import count_micro_batches, is_out_of_memory
from nanoladder.run.metrics import flops_per_token

WARMUP = 2  # steps before the clock starts (see warmup): the first compiles, both touch memory for the first time
COMPARED = 5  # steps whose losses are compared with naive's
WINDOW = 1.0  # seconds: the least that is timed
POINTS = 50  # of a curve of losses


def main(argv):
    parser = Parser(prog="lab.measure", allow_abbrev=False)
    choices = ["machine", "limits", "examine", "time", "turns", "silent", "exchange", "curve"]
    parser.add_argument("measurement", choices=choices)
    parser.add_argument("--steps", type=int, default=4, help="least number of steps to time")
    parser.add_argument("--address", help="of turns: of the connection that asks")
    parser.add_argument("--threads", type=int, help="threads of each process")
    parser.add_argument("--trace", help="folder for a Chrome trace and, on CUDA, a snapshot of the memory")
    options, config_words = parser.parse_known_args(argv)
    connection = Client(options.address) if options.address else None
    # The learning rate reaches its peak within the steps that are compared, so that a wrong update shows in the losses.
    schedule = ["--max_steps=1000000", f"--warmup_steps={COMPARED}"] if options.measurement != "curve" else []
    config = load_config([*config_words, *schedule])
    try:
        match options.measurement:
            case "machine":
                measured = describe(Loop.set_up(config))
            case "limits":
                measured = limits(Loop.set_up(config))
            case "examine":
                measured = examine(config, options.trace)
            case "curve":
                measured = curve(config)
            case "time":
                measured = time_steps(config, options.steps, options.threads)
            case "turns":
                measured = take_turns(config, connection)
            case "silent":
                measured = time_without_communication(config, options.steps, options.threads)
            case "exchange":
                measured = exchange(config, options.threads)
    except Exception as error:
        end_if_out_of_memory(error)
        explain_compiler_failure(error, config)
        raise
    print(json.dumps(measured))
    parallel.stop()


def end_if_out_of_memory(error):
    """Exits with a line that says so."""
    if is_out_of_memory(error):
        sys.exit("error: out of memory")


class Loop:
    """The training loop of train.py, set up from a config and advanced step by step."""

    def __init__(self, config, threads=None):
        self.device = self.set_up(config)
        if threads:
            torch.set_num_threads(threads)
        self.dataset = data.open_dataset(config)
        self.config = config = dataclasses.replace(config, vocab_size=self.dataset.vocab_size)
        machine.check(config, self.device)
        self.resident_before = resident_before()
        self.model = train.build_model(config, self.device)
        self.optimizer = train.build_optimizer(self.model, config)
        self.batches = enumerate(train.training_batches(self.dataset.train, config, 1, self.device), 1)

    @staticmethod
    def set_up(config):
        """Sets up the process as training does. Returns the device."""
        return train.set_up(config)

    def learning_rate(self, step):
        return train.learning_rate(step, self.config)

    def step(self):
        """Takes the next step. Returns its loss, which may be a tensor on the device."""
        with record_function("data wait"):
            number, batch = next(self.batches)
        lr = self.learning_rate(number)
        with record_function("step"):
            loss, _ = train.train_step(self.model, self.optimizer, batch, lr, self.config)
        return machine.double(loss) if torch.is_tensor(loss) else loss  # sums of losses are exact enough

    def val_loss(self):
        return train.evaluate(self.model, self.dataset.val, self.config, self.device)

    def val_digest(self):
        """A digest of the tokens on which val_loss() is measured."""
        digest = hashlib.sha256()
        for batch in data.ValidationBatches(self.dataset.val, self.config):
            digest.update(batch.targets[batch.targets != IGNORE].numpy().tobytes())
        return digest.hexdigest()[:8]

    def all_reduce_mean(self, seconds):
        """The mean over the processes, so that all of them take the same number of steps."""
        return float(parallel.all_reduce_mean(torch.tensor(seconds, device=self.device)))

    def seconds(self, steps, window=WINDOW):
        """Mean seconds of a step over the next steps: as many as given, or more if those take less than the window.

        The clock is read only before and after all steps, when the device has finished: a host that runs ahead gains.
        """
        start = synchronized_time(self.device)
        for _ in range(steps):
            self.step()
        elapsed = self.all_reduce_mean(synchronized_time(self.device) - start)
        return elapsed / steps if elapsed >= window else self.seconds(math.ceil(1.2 * steps * window / elapsed))


def warmup(config):
    """Steps before the clock starts: one more if the second records the CUDA graphs that later steps replay."""
    return WARMUP + replays_graphs(config)


def time_steps(config, steps, threads):
    """Seconds of a step after the warm-up, seconds of the first step, and peak resident memory above the start's."""
    loop = Loop(config, threads)
    first = loop.seconds(1, window=0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which may be the compiler's
    loop.seconds(warmup(config) - 1, window=0)
    seconds = loop.seconds(steps)
    peak = resident_bytes("VmHWM")
    return {
        "seconds": seconds,
        "first_step_seconds": first,
        "resident_bytes": peak and peak - loop.resident_before,
        "tokens": config.batch_size * config.context_length,
    }


def take_turns(config, connection):
    """Trains as time_steps does, but measures a window of steps only when a message asks, until there is no more.

    Answers first with the losses of the first COMPARED steps and with seconds of a step after the warm-up; then each
    message with seconds of a step.
    """

    def answer(**figures):
        connection.send_bytes(json.dumps(figures).encode())

    loop, losses = Loop(config), []
    for step in range(COMPARED):
        if step == warmup(config):
            start = synchronized_time(loop.device)
        losses.append(loop.step())
    seconds = (synchronized_time(loop.device) - start) / (COMPARED - warmup(config))
    answer(losses=[float(loss) for loss in losses], seconds=seconds)
    with contextlib.suppress(EOFError):
        while connection.recv_bytes():
            answer(seconds=loop.seconds(math.ceil(WINDOW / seconds), window=0))


def curve(config):
    """Losses of the config's whole run, each the mean over a POINTS-th of its steps, and the final validation loss.

    A run whose loss is not finite ends there, without that loss and without a validation loss.
    """
    loop = Loop(config)
    width = math.ceil(config.max_steps / POINTS)
    learning_rate = max(loop.learning_rate(step) for step in range(1, config.max_steps + 1))
    found = {"learning_rate": learning_rate, "tokens": [], "losses": [], "val_loss": None}
    for start in range(0, config.max_steps, width):
        steps = min(width, config.max_steps - start)
        loss = float(sum(loop.step() for _ in range(steps))) / steps
        if not math.isfinite(loss):
            return found
        found["tokens"].append((start + steps) * config.batch_size * config.context_length)
        found["losses"].append(loss)
    val_loss = loop.val_loss()
    return found | {"val_loss": val_loss if math.isfinite(val_loss) else None, "val_data": loop.val_digest()}


def time_without_communication(config, steps, threads):
    """Seconds of a step in which no gradient is averaged, and the bytes of gradients that a step would average."""
    sent = {}

    def keep(_, bucket):
        sent[bucket.index()] = bucket.buffer().nbytes  # of one step
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    loop = Loop(config, threads)
    loop.model.register_comm_hook(None, keep)
    loop.seconds(warmup(config), window=0)
    sent.clear()  # the first step had other buckets
    return {"seconds": loop.seconds(steps), "bytes": sum(sent.values())}


def exchange(config, threads):
    """{kind of message: [number, bytes]} that this process sends in a step, and the peak bytes of all tensors.

    The peak is that of the process with the highest, on a CPU with the copies that gloo makes. Of a pipeline also its
    predicted bubble: the share of a step in which a process waits. A counted step is not compiled.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop = Loop(config, threads)
        loop.seconds(WARMUP, window=0)
    on_gpu = loop.device.type == "cuda"
    peak = (
        torch.cuda.max_memory_allocated(loop.device) if on_gpu else max(now for _, now in allocated(profiler, on_gpu))
    )
    with Counter() as counter:
        loop.step()
    found = {"sent": dict(counter.sent), "peak": max(parallel.gather_objects(peak))}
    n = parallel.mesh().sizes.pipeline
    if n > 1:
        n_micro_batches = count_micro_batches(config, parallel.world_size())
        found["bubble"] = parallel.predict_bubble(config.pipeline_schedule, n, n_micro_batches)
    return found


def examine(config, trace=None):
    """Losses of the first COMPARED steps, the memory of step WARMUP by part, and the time of the last step by kind.

    If CUDA graphs are recorded, it is in step WARMUP: the allocator sees no memory in the steps that replay them.
    """
    on_gpu = machine.choose_device(config.device).type == "cuda"
    torch._inductor.config.cpp.enable_kernel_profile = not on_gpu  # compiled CPU kernels show up by name
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory_profiler:
        loop = Loop(config)
        losses = [float(loop.step()) for _ in range(WARMUP - 1)]
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(loop.device)  # the compiler's trials do not count
        losses.append(float(loop.step()))
    memory = anatomy(loop, memory_profiler)
    losses += [float(loop.step()) for _ in range(COMPARED - WARMUP - 1)]

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, record_shapes=True) as profiler:
        start = synchronized_time(loop.device)
        losses.append(float(loop.step()))
        seconds = synchronized_time(loop.device) - start
    if trace:
        keep_trace(loop, profiler, Path(trace))
    found = {
        "losses": losses,
        "memory": memory,
        "seconds_by_kind": seconds_by_kind(profiler.events(), loop.config, on_gpu),
        "profiled_seconds": seconds,
        "product_dtype": product_dtype(loop.config, loop.device),
        "parameters": loop.model.n_params,
        "flops_per_token": flops_per_token(loop.model),
        "attention_kernel": machine.attention_kernel(loop.config, loop.device),
    }
    with contextlib.suppress(BadInput):  # the 8-bit states of bitsandbytes cannot be predicted
        found["predicted"] = predict.predict_memory(loop.config, loop.device.type).peak
    return found


def keep_trace(loop, profiler, folder):
    """Writes trace.json.gz, for a browser's tracing page, and on CUDA the memory of one more step to memory.pickle."""
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    if loop.device.type == "cuda":
        torch.cuda.memory._record_memory_history()
        loop.step()
        torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))


def resident_before():
    """Resident bytes before a loop is built. The compiler, loaded later in a new process, counts as there already."""
    import torch._inductor.compile_fx  # noqa: F401

    return resident_bytes("VmRSS")


def resident_bytes(field):
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM), less files mapped now; None if not known.

    Mapped files, such as libraries, are left out because a fork starts without those that its parent has touched.
    """
    with contextlib.suppress(OSError, StopIteration):  # no /proc, or one without these fields
        rss, files = (machine.proc_bytes("/proc/self/status", name) for name in (field, "RssFile"))
        return rss - files


if __name__ == "__main__":
    run_script(main)
