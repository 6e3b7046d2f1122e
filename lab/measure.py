"""What one process measures: python measure.py machine|examine|curve|time|silent|limits|trial config/x.py

Each measurement prints one line of JSON. All of them train with train.py's own train_step on real batches.
"""

import contextlib
import dataclasses
import json
import math
import platform
import statistics
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

import train
from lab import predict
from nanoladder import machine, optim, parallel
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


def anatomy(this, profiler):
    """Bytes of what the last step held, by what it was for; the parts add up to the peak of all tensors.

    activations: what lives at the end of the first forward beyond weights, optimizer state, kept gradients and cuBLAS's
    workspaces, the batch included. rest: what the peak has beyond that end; gradients are part of it where they are
    dropped between steps. On CUDA the peak is the allocator's; on a CPU it is the highest sum of allocations less
    releases that torch.profiler saw. reserved: what CUDA's allocator holds. context: what else is taken of the GPU's
    memory.
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
        if change.start_ns() > step_start:
            peak = max(peak, now)
        if change.start_ns() < backward_start:
            forward_end = now

    def size(tensors):
        return sum(part.nbytes for tensor in tensors for part in plain(tensor))

    parameters = list(this.model.parameters())
    state = [value for values in this.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    held = {
        "weights": size([*parameters, *this.model.buffers()]),
        "gradients": size(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": size(state),
    }
    kept = held["weights"] + held["optimizer"] + (0 if this.config.set_to_none else held["gradients"])
    if on_gpu:
        free, total = torch.cuda.mem_get_info(this.device)
        peak = torch.cuda.max_memory_allocated(this.device)
        forward_end -= predict.cublas_workspaces()
        held["reserved"] = torch.cuda.max_memory_reserved(this.device)
        held["context"] = total - free - torch.cuda.memory_reserved(this.device)
    return held | {"activations": forward_end - kept, "rest": peak - forward_end, "peak": peak}


def plain(tensor):
    """The tensors that hold a tensor's numbers: itself; of an 8-bit one, which says it is float32, its parts."""
    return [part for part in tree_leaves(optim.plain_parts(tensor)) if torch.is_tensor(part)]


# Where a step's time goes. The first kind wins of which a word is in the name of an operator or of what called it.
KINDS = {
    "data": ["data wait"],
    "optimizer": ["Optimizer.", "_foreach_", "linalg_vector_norm"],  # clipping included
    "attention": ["scaled_dot_product", "bmm", "aten::_softmax", "fused__softmax"],
    "gemm": ["aten::mm", "aten::addmm", "linear_pointwise", "triton_tem", "triton_mm"],  # the last two: max-autotune
    "loss": ["log_softmax", "nll_loss", "logsumexp", "ChunkedLoss", "_mul_ne_"],
}
# Python, autograd and the compiler's wrappers between the operators: what no operator accounts for is the host's.
BETWEEN = ("step", "autograd::engine", "TorchDynamo", "Torch-Compiled", "CompiledFunction", "AOTDispatcher", "## Call")


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
        if len(shape) == 2 and shape[0] == N and shape[1] in rows and config.n_embd not in rows:
            return "loss"
    return "elementwise"


def seconds_by_kind(events, config, on_gpu):
    """Seconds of a step by KINDS, of the operators on a CPU, of their kernels on a GPU; data is the host's wait."""
    seconds = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue  # a kernel: it counts with the operator that launched it
        kind = kind_of(event, config)
        if not on_gpu:
            microseconds = 0 if event.name.startswith(BETWEEN) else event.self_cpu_time_total
        elif kind == "data":
            microseconds = event.cpu_time_total if event.name == "data wait" else 0
        else:
            microseconds = event.self_device_time_total
        seconds[kind] += microseconds / 1e6
    return seconds


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
    """Seconds of an action: the median of seven windows of a fifth of a second, after two actions to warm up."""

    clock = report.StepClock(device)

    def window(count):
        start = clock.synchronize()
        for _ in range(count):
            action()
        return (clock.synchronize() - start) / count

    window(1)
    count = math.ceil(0.2 / window(1))
    return statistics.median(window(count) for _ in range(7))


def describe(device):
    """What the figures depend on: processor, device, versions."""
    on_gpu = device.type == "cuda"
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "native_bfloat16": torch.cpu._is_avx512_bf16_supported(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "datasheet_flops": report.peak_flops(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # from 9.15 on its attention comes before flash
        "python": platform.python_version(),
    }


def resident_bytes(field):
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM); None where there is no /proc."""
    with contextlib.suppress(OSError):
        return machine.proc_bytes("/proc/self/status", field)


if __name__ == "__main__":
    run_script(main)
