"""The memory of a step by purpose, and its time by kind of work."""

import torch
from torch.utils._pytree import tree_leaves

from lab.predict.trace import cublas_workspaces
from nanoladder import machine
from nanoladder.checkpoint.state import plain_parts

# Kinds of work. An operator is of the first kind with a word in its name or in that of one of its callers; a kernel is
# of the first kind with a word in its own name or in that of an operator that launched it. A CUDA graph launches
# kernels without operators, hence the names of kernels, by PyTorch, cuBLAS and cuDNN.
KINDS = {
    "data": ["data wait"],
    "optimizer": ["Optimizer.", "_foreach_", "linalg_vector_norm", "multi_tensor_apply"],  # clipping included
    "attention": [
        *["scaled_dot_product", "nanoladder::attend", "bmm", "aten::_softmax", "fused__softmax"],
        *["flash_", "fmha_", "sdpa"],  # kernels
    ],
    "gemm": [
        *["aten::mm", "aten::addmm", "aten::_scaled_mm", "linear_pointwise"],
        *["triton_tem", "triton_mm"],  # max-autotune
        *["gemm", "gemv", "nvjet", "xmma", "cutlass", "cublas"],  # kernels
    ],
    "loss": ["log_softmax", "nll_loss", "logsumexp", "chunked_loss", "head_loss"],
}
LOSSES = {"nanoladder::chunked_loss", "nanoladder::sampled_head_loss"}
LAUNCHES = ("cuda", "cuLaunch", "cuMem")  # calls of CUDA's two interfaces start with one of these
# Wrappers added by Python, autograd and the compiler: their own time, outside any operator, is the host's.
BETWEEN = ("step", "autograd::engine", "TorchDynamo", "Torch-Compiled", "CompiledFunction", "AOTDispatcher", "## Call")


def allocated(profiler, on_gpu):
    """Yields (nanoseconds, bytes allocated since the start) after each allocation and release in a profile."""
    device_type = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = profiler.profiler.kineto_results.events()
    changes = (event for event in events if event.name() == "[memory]" and event.device_type() == device_type)
    now = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        yield change.start_ns(), now


def memory_by_part(loop, profiler):
    """Bytes of the last step's memory by purpose.

    Weights, optimizer state, kept gradients, activations and rest add up to the peak.

    loop: a measure.Loop that has taken the step. profiler: torch.profiler's, with profile_memory, over all its steps.
    activations: memory in use at the end of the first forward, including the batch, minus weights, optimizer state,
    kept gradients and cuBLAS's workspaces. rest: the peak minus memory in use at the end of the first forward; includes
    gradients if they are dropped between steps. On CUDA the peak is the allocator's; on a CPU it is the highest sum of
    the allocations and releases that torch.profiler saw. reserved: held by CUDA's allocator. context: the rest of the
    GPU's memory in use.
    """
    on_gpu = loop.device.type == "cuda"
    events = profiler.profiler.kineto_results.events()
    step_start = max(event.start_ns() for event in events if event.name() == "step")
    backward = "autograd::engine::evaluate_function"
    starts = (event.start_ns() for event in events if event.name().startswith(backward))
    backward_start = min(start for start in starts if start > step_start)
    peak = forward_end = 0
    for time, now in allocated(profiler, on_gpu):
        if time > step_start:
            peak = max(peak, now)
        if time < backward_start:
            forward_end = now

    def size(tensors):
        return sum(part.nbytes for tensor in tensors for part in plain(tensor))

    parameters = list(loop.model.parameters())
    state = [value for values in loop.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    held = {
        "weights": size([*parameters, *loop.model.buffers()]),
        "gradients": size(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": size(state),
    }
    kept = held["weights"] + held["optimizer"] + (0 if loop.config.set_to_none else held["gradients"])
    if on_gpu:
        free, total = torch.cuda.mem_get_info(loop.device)
        peak = torch.cuda.max_memory_allocated(loop.device)
        forward_end -= cublas_workspaces()
        held["reserved"] = torch.cuda.max_memory_reserved(loop.device)
        held["context"] = total - free - torch.cuda.memory_reserved(loop.device)
    return held | {"activations": forward_end - kept, "rest": peak - forward_end, "peak": peak}


def plain(tensor):
    """The tensors that store a tensor's numbers: its parts if it is 8-bit (and claims float32), else itself."""
    return [part for part in tree_leaves(plain_parts(tensor)) if torch.is_tensor(part)]


def kind_of(event, config, kernel=""):
    """Classifies an event of torch.profiler, or a kernel that it launched, by its name; a kernel is never a data wait.

    Norms, activations, residuals, copies and dropout are "elementwise". event: None if only the kernel is known.
    """
    names, ancestor = [kernel], event
    while ancestor is not None:
        names.append(ancestor.name)
        ancestor = ancestor.cpu_parent
    # A kernel does not wait for data, and the softmax of a loss's operator is not attention's.
    excluded = {"data": kernel, "attention": not LOSSES.isdisjoint(names)}
    for kind, words in KINDS.items():
        if not excluded.get(kind) and any(word in name for word in words for name in names):
            return kind
    T, N = config.context_length, (config.micro_batch_size or config.batch_size) * config.context_length
    rows = range(config.vocab_size, config.vocab_size + config.pad_vocab_to)
    for shape in (event and event.input_shapes) or []:
        if len(shape) == 4 and shape[2] == shape[3] == T:
            return "attention"
        if len(shape) == 2 and shape[0] == N and shape[1] in rows and config.n_embd not in rows:
            return "loss"
    return "elementwise"


def seconds_by_kind(events, config, on_gpu):
    """Seconds of a step by kind: of operators on a CPU, of kernels and copies on a GPU.

    Data is the time that the host waits for a batch.
    """
    seconds = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    of_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    if not on_gpu:
        for event in of_host:
            seconds[kind_of(event, config)] += 0 if event.name.startswith(BETWEEN) else event.self_cpu_time_total / 1e6
        return seconds
    seconds["data"] = sum(event.cpu_time_total for event in of_host if event.name == "data wait") / 1e6
    launches = {event.id: event.cpu_parent for event in of_host if event.name.startswith(LAUNCHES)}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:  # a range, no kernel
            seconds[kind_of(launches.get(event.id), config, event.name)] += event.self_device_time_total / 1e6
    return seconds


def product_format(config, device):
    """The format of the matrix products' inputs: float32, tf32, bfloat16 or float16."""
    dtype = machine.choose_dtype(config.dtype, device)
    if dtype == torch.float32 and device.type == "cuda" and config.matmul_precision != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")
