"""Predicts the memory of a training step, the largest micro-batch that fits, and the cost of a run.

train.py's own step runs on fake tensors, which have a shape and a dtype but no numbers. That takes seconds and no
accelerator, yet allocates and frees what a real step does, compiled or not, and a ledger counts the bytes that are
alive. Nothing is fitted to measurements; the few constants are PyTorch's.
"""

import bisect
import contextlib
import dataclasses
import functools
import math
import weakref
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import train
from lab.compiled import without_kernels
from model import GPT
from nanoladder import machine
from nanoladder.data import Batch
from nanoladder.data.batches import tokens_seen
from nanoladder.errors import BadInput
from nanoladder.kernels import loss
from nanoladder.run.memory import block_activations, divisors, product_dtype, share_of_process
from nanoladder.run.metrics import flops_per_token

CUDA_BLOCK = 512  # bytes; CUDA's allocator rounds every tensor up to a multiple of this
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process's tensors in a step, from the second step on, when the optimizer has its state.

    activations: all that the forward of one micro-batch keeps for the backward, with autocast's half-precision copies
    of the weights. block: the part of them that one transformer block keeps. temporary: the peak less all that is
    alive at the end of the forward. The parts add up to the peak if gradients are kept between steps; if they are
    dropped, they grow while activations are freed, and are within temporary. block is 0 if the model is compiled as a
    whole, because its blocks are not apart then.
    """

    weights: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    block: int
    temporary: int
    peak: int


# -- counting the bytes of a step


class Ledger(TorchDispatchMode):
    """Counts the bytes of all storages that are alive (now), and their maximum over time (peak)."""

    supports_higher_order_operators = True  # operators that call another one, in compiled programs

    def __init__(self, on_cuda):
        super().__init__()
        self.on_cuda = on_cuda
        self.alive = weakref.WeakSet()
        self.now = self.peak = 0
        self.gradient_sum = None  # a weak reference to the first addend, and the bytes alive with the sum

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a wrapper has no bytes: its inner tensors come by themselves
        if operator is torch.ops.nanoladder.head_loss.default:
            with self:
                return loss.compute(*args)  # its operations, as it is opaque
        self.settle_gradient_sum()
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.alive:
                self.add(tensor.untyped_storage())
        if in_backward() and operator is aten.add.Tensor and can_hold_sum(args[0]):
            self.gradient_sum = weakref.ref(args[0].untyped_storage()), self.now
        else:
            self.peak = max(self.peak, self.now + self.scratch(operator, args))
        return result

    def settle_gradient_sum(self):
        """Counts the last sum of two gradients as a new tensor, unless its first addend is gone by now.

        Autograd writes such a sum over the first addend if nothing else refers to it (input_buffer.cpp in PyTorch). It
        does not for fake tensors, but drops its reference to the addend right after.
        """
        if self.gradient_sum:
            addend, now = self.gradient_sum
            self.gradient_sum = None
            if addend() is not None:
                self.peak = max(self.peak, now)

    def add(self, storage):
        size = storage.nbytes()
        if self.on_cuda:
            size = math.ceil(size / CUDA_BLOCK) * CUDA_BLOCK
        self.alive.add(storage)
        self.now += size
        weakref.finalize(storage, self.subtract, size)

    def subtract(self, size):
        self.now -= size

    def scratch(self, operator, args):
        """Bytes that a kernel allocates for itself and frees before it returns, for the kernels that take many."""
        if isinstance(operator, HigherOrderOperator):
            return 0
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dim()]
        if self.on_cuda:  # fused attention's backward sums dq in float32 (mha_bwd in PyTorch's flash_api.cpp)
            fused = "attention_backward" in operator.name() and tensors[0].itemsize == 2
            return 4 * tensors[0].numel() if fused else 0
        if torch.Tag.pointwise not in operator.tags or len({tensor.dtype for tensor in tensors}) < 2:
            return 0
        # A CPU copies operands of two dtypes to their common one first (TensorIterator); CUDA casts as it reads.
        common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return sum(common.itemsize * tensor.numel() for tensor in tensors if tensor.dtype != common)


def in_backward():
    """True in a backward pass, except in a forward that is recomputed there."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def can_hold_sum(tensor):
    return not tensor._is_view() and aten.is_non_overlapping_and_dense(tensor)


@contextlib.contextmanager
def cuda_kernels(attention):
    """Lets the model allocate on CPU tensors as CUDA's kernels do, wherever the two differ.

    PyTorch 2.13 cannot run a backward on fake CUDA tensors unless it finds a GPU, so every step is traced on the CPU.
    """
    softmax, dropout = torch.Tensor.softmax, F.dropout

    def attend(q, k, v, dropout_p, is_causal):
        if q.itemsize == 2 and attention != "efficient":  # cuDNN's kernel keeps the same tensors as flash
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal)[0]

    def softmax_in_float32(x, dim):  # CUDA's autocast does this, the CPU's does not
        return softmax(x.float() if torch.is_autocast_enabled("cpu") else x, dim)

    def dropout_by_bool(x, p, training, inplace):  # CUDA's mask is bool, the CPU's has the dtype of x
        return torch.native_dropout(x, p, True)[0] if p and training else dropout(x, p, training, inplace)

    def softmax_in_place(logits, *_, **__):  # one kernel, as is the product that is added to the weight's gradient
        return torch.empty(2, len(logits)).unbind()

    with (
        patch.multiple(F, scaled_dot_product_attention=attend, dropout=dropout_by_bool),
        patch.object(loss.softmax, "softmax_", softmax_in_place),
        patch.object(loss, "add_product", lambda *_: None),
        patch.object(torch.Tensor, "softmax", softmax_in_float32),
    ):
        yield


def cublas_workspaces():
    """Bytes of cuBLAS's workspaces: one for the forward's thread, one for the backward's (CublasHandlePool.cpp)."""
    large = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)
    return int(2 * 2**20 * (32 if large else 8.125))  # Hopper and data-center Blackwell, or any other


@functools.cache
def trace(config, device_type):
    """Memory of train.py's step on fake tensors, the whole batch as one micro-batch; only here is train.py called."""
    ledger = Ledger(device_type == "cuda")
    kernels = cuda_kernels(config.attention) if ledger.on_cuda else contextlib.nullcontext()
    programs = without_kernels(ledger) if config.compile else contextlib.nullcontext()
    if config.optimizer == "adamw8bit":
        build_8bit_tables()
    finite = patch.object(train, "finite", lambda *_: True)  # there are no numbers to check
    numbers = patch.object(torch.Tensor, "item", lambda _: 1.0)  # Adafactor reads some
    stays = patch.object(GPT, "to", lambda model, _: model)  # fake weights cannot be moved, and are in place
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # a random state is real
    with torch.random.fork_rng(devices=[]), programs, fake, ledger, kernels, finite, numbers, stays:
        model = train.build_model(config, torch.device("cpu"))
        weights = ledger.now
        optimizer = train.build_optimizer(model, config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = ledger.now - weights
        optimizer.step()  # creates the optimizer's state
        state = ledger.now - weights - gradients
        if config.optimizer_in_backward:
            gradients = max(parameter.grad.nbytes for parameter in model.parameters())
            optimizer.zero_grad()
        batch = Batch(*torch.empty(2, config.batch_size, config.context_length, dtype=torch.long).unbind())

        whole, block = record_forwards(model, ledger), [0, 0]
        if not model._compiled_call_impl:  # compiled as a whole
            block = record_forwards(model.blocks[0], ledger)
        scaler = torch.amp.GradScaler("cpu", enabled=False)  # enabled, it holds a few scalars
        ledger.peak = 0
        train.train_step(model, optimizer, scaler, batch, config.learning_rate, config)
    (start, end), (block_start, block_end) = whole[:2], block[:2]  # later forwards recompute
    workspaces = cublas_workspaces() if ledger.on_cuda else 0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=state,
        inputs=sum(part.nbytes for part in batch),
        activations=end - start,
        block=block_end - block_start,
        temporary=ledger.peak - end + workspaces,
        peak=ledger.peak + workspaces,
    )


def build_8bit_tables():
    """Lets torchao compute and cache its quantization tables with real numbers, as fake tensors have none."""
    machine.eight_bit_library(torch.device("cpu"))
    from torchao.optim.subclass_8bit import OptimState8bit

    for signed in (False, True):
        OptimState8bit.zeros(256, signed)


def record_forwards(module, ledger):
    """A list that every forward of the module appends to: bytes alive before, bytes alive after."""
    moments, compiled = [], module._compiled_call_impl

    def call(*args):
        moments.append(ledger.now)
        result = compiled(*args)
        moments.append(ledger.now)
        return result

    if compiled:
        module._compiled_call_impl = call
    else:
        module.register_forward_pre_hook(lambda *_: moments.append(ledger.now))
        module.register_forward_hook(lambda *_: moments.append(ledger.now))
    return moments


# -- predictions


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
