"""Where the memory and the time of a step go."""

import torch
from torch.utils._pytree import tree_leaves

from lab import predict
from nanoladder import machine, optim

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
