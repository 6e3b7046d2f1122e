"""What one process measures for profile.py: python measure.py examine|time|silent|limits config/x.py [options]

Each measurement prints one line of JSON. All of them train with train.py's own train_step on real batches.
"""

import contextlib
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import machine
import train
from config import Parser, load_config, run

WARMUP = 2  # steps before the clock starts: the first compiles, both touch memory for the first time
COMPARED = 5  # steps whose losses are compared with naive's
WINDOW = 1.0  # seconds that are timed at least


def main(argv):
    parser = Parser(prog="measure.py", allow_abbrev=False)
    parser.add_argument("what", choices=["examine", "time", "silent", "limits"])
    parser.add_argument("--steps", type=int, default=4, help="timed at least")
    parser.add_argument("--trace", help="folder for a Chrome trace, and a snapshot of CUDA's memory")
    options, config_argv = parser.parse_known_args(argv)
    # The learning rate rises to its height within the steps that are compared: a wrong update shows in their losses.
    config = load_config([*config_argv, "--max_steps=1000000", f"--warmup_steps={COMPARED}"])
    try:
        match options.what:
            case "examine":
                measured = examine(config, options.trace)
            case "time":
                measured = time_steps(config, options.steps)
            case "silent":
                measured = time_without_communication(config, options.steps)
            case "limits":
                measured = limits(train.set_up(config))
    except torch.OutOfMemoryError:
        measured = {"error": "out of memory"}
    print(json.dumps(measured))


class Run:
    """A run as train.py sets it up, of which only steps are taken."""

    def __init__(self, config):
        self.device = train.set_up(config)
        meta, split, _ = train.open_dataset(config.dataset, config.vocab_size, config.context_length)
        self.config = dataclasses.replace(config, vocab_size=meta["vocab_size"])
        self.resident_before = resident_bytes("VmRSS")
        self.model, self.optimizer, self.scaler = train.build(self.config, self.device)
        machine.choices(self.config, self.device)  # refuses what cannot run here
        self.batches = enumerate(train.training_batches(split, self.config, 0, self.device), 1)

    def step(self):
        """Takes the next step and returns its loss, which may be on the device."""
        with record_function("data wait"):
            number, batch = next(self.batches)
        lr = train.learning_rate(number, self.config)
        with record_function("step"):
            return train.train_step(self.model, self.optimizer, self.scaler, batch, lr, self.config)[0]

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, steps, window=WINDOW):
        """Mean seconds of the next steps, of more if that many take less than the window.

        The clock is read at both ends only, when the device has finished: a host that runs ahead gains.
        """
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        elapsed = time.perf_counter() - start
        return elapsed / steps if elapsed >= window else self.seconds(math.ceil(1.2 * steps * window / elapsed))


def time_steps(config, steps):
    """Seconds of a step after the warm-up and of the first one, and the peak of resident memory above the start's."""
    this = Run(config)
    first, _, seconds = this.seconds(1, window=0), this.seconds(WARMUP - 1, window=0), this.seconds(steps)
    peak = resident_bytes("VmHWM")
    return {
        "seconds": seconds,
        "first_step_seconds": first,
        "resident_bytes": peak and peak - this.resident_before,
        "tokens": config.batch_size * config.context_length,
    }


def time_without_communication(config, steps):
    """Seconds of a step whose gradients stay each process's own, and the bytes that each would have sent in it."""
    sent = {}

    def keep(_, bucket):
        sent[bucket.index()] = bucket.buffer().nbytes  # of one step
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    this = Run(config)
    this.model.register_comm_hook(None, keep)
    this.seconds(WARMUP, window=0)
    sent.clear()  # the first step had other buckets
    return {"seconds": this.seconds(steps), "bytes": sum(sent.values())}


def examine(config, trace=None):
    """The first losses, the memory that the second step takes, and where the time of the last one goes."""
    torch._inductor.config.cpp.enable_kernel_profile = True  # compiled CPU kernels show up by name
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory_profiler:
        this = Run(config)
        on_gpu = this.device.type == "cuda"
        losses = [float(this.step()) for _ in range(WARMUP - 1)]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(this.device)  # without what the compiler tried out
        losses.append(float(this.step()))
    memory = anatomy(this, memory_profiler)
    losses += [float(this.step()) for _ in range(COMPARED - WARMUP - 1)]

    if trace and on_gpu:
        torch.cuda.memory._record_memory_history()
    this.synchronize()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, record_shapes=True) as profiler:
        start = time.perf_counter()
        losses.append(float(this.step()))
        this.synchronize()
        seconds = time.perf_counter() - start
    if trace:
        Path(trace).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(Path(trace, "trace.json.gz")))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(Path(trace, "memory.pickle")))
    return {
        "losses": losses,
        "memory": memory,
        "time_by_kind": time_by_kind(profiler.events(), seconds, this.config, on_gpu),
        "product_dtype": product_dtype(this.config, this.device),
        "parameters": this.model.n_params(),
        "flops_per_token": this.model.flops_per_token(),
    }


def anatomy(this, profiler):
    """Bytes of what a step holds: its weights, gradients, optimizer state, activations and the peak of all tensors.

    Activations are what lives at the end of the first forward beyond the rest. On CUDA the peak is the allocator's;
    on a CPU it is the highest sum of allocations less releases that torch.profiler saw. reserved and context are
    what the allocator and the driver hold beyond it.
    """
    on_gpu = this.device.type == "cuda"
    events = profiler.profiler.kineto_results.events()
    step_start = max(event.start_ns() for event in events if event.name() == "step")
    backward = "autograd::engine::evaluate_function"
    starts = (event.start_ns() for event in events if event.name().startswith(backward))
    backward_start = min(start for start in starts if start > step_start)
    now = peak = forward_end = 0
    device_type = torch._C._autograd.DeviceType.CUDA if on_gpu else torch._C._autograd.DeviceType.CPU
    changes = (event for event in events if event.name() == "[memory]" and event.device_type() == device_type)
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
        if change.start_ns() < backward_start:
            forward_end = now

    def size(tensors):
        return sum(tensor.nbytes for tensor in tensors)

    parameters = list(this.model.parameters())
    state = [value for values in this.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    held = {
        "weights": size([*parameters, *this.model.buffers()]),
        "gradients": size(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": size(state),
    }
    kept = held["weights"] + held["optimizer"] + (0 if this.config.set_to_none else held["gradients"])
    held |= {"activations": forward_end - kept, "peak": peak}
    if on_gpu:
        free, total = torch.cuda.mem_get_info(this.device)
        reserved = torch.cuda.memory_reserved(this.device)
        held |= {
            "peak": torch.cuda.max_memory_allocated(this.device),
            "reserved": torch.cuda.max_memory_reserved(this.device),
            "context": total - free - reserved,
        }
    return held


# Where a step's time goes. The first kind wins of which a word is in the name of an operator or of what called it.
KINDS = {
    "data": ["data wait"],
    "optimizer": ["Optimizer.", "_foreach_", "linalg_vector_norm"],  # clipping included
    "attention": ["scaled_dot_product", "bmm", "aten::_softmax"],
    "gemm": ["aten::mm", "aten::addmm", "linear_pointwise"],
    "loss": ["log_softmax", "nll_loss", "logsumexp", "ChunkedLoss", "_mul_ne_"],
}


def kind_of(event, config):
    """Which of KINDS an event of torch.profiler is, or elementwise: norms, activations, residuals, copies, dropout."""
    names, ancestor = [], event
    while ancestor is not None:
        names.append(ancestor.name)
        ancestor = ancestor.cpu_parent
    for kind, words in KINDS.items():
        if any(word in name for word in words for name in names):
            return kind
    T, N = config.context_length, (config.micro_batch_size or config.batch_size) * config.context_length
    rows = range(config.vocab_size, config.vocab_size + config.pad_vocab_to)
    for shape in event.input_shapes or []:
        if len(shape) == 4 and shape[2] == shape[3] == T:
            return "attention"
        if len(shape) == 2 and shape[0] == N and shape[1] in rows:
            return "loss"
    return "elementwise"


def time_by_kind(events, seconds, config, on_gpu):
    """Shares of a step's time. host is what no operator accounts for: Python, and on a GPU its waiting for launches."""
    shares = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU:
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            shares[kind_of(event, config)] += microseconds / 1e6 / seconds
    shares["host"] = max(0.0, 1 - sum(shares.values()))
    return shares


def product_dtype(config, device):
    """What the matrix products multiply: float32, tf32, bfloat16 or float16."""
    dtype = machine.choose_dtype(config.dtype, device)
    if dtype == torch.float32 and device.type == "cuda" and config.matmul_precision != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")


def limits(device):
    """What the machine itself can do: FLOP/s of a large square matrix product by dtype, bytes/s of a copy."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 2048
    rates = {}
    for name in ["float32", "bfloat16"] + ["tf32", "float16"] * on_gpu:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rates[name] = 2 * n**3 / fastest(lambda a=a, b=b: a @ b, device)
    source = torch.ones(2**30 // 4 if on_gpu else 2**28 // 4, device=device)  # 1 GiB, 256 MiB
    target = torch.empty_like(source)
    return {"flops": rates, "copy_bytes": 2 * source.nbytes / fastest(lambda: target.copy_(source), device)}


def fastest(action, device):
    """Seconds of an action: the median of seven windows, each long enough for the clock, after one to warm up."""

    def window(count):
        start = time.perf_counter()
        for _ in range(count):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    count = max(1, round(0.05 / window(1)), round(0.05 / window(1)))
    return statistics.median(window(count) for _ in range(7))


def resident_bytes(field):
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM); None where there is no /proc."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    run(main)
