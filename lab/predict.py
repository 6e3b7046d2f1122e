"""Predicts the memory of a training step, what fits into a given memory, and what a run costs.

The step is train.py's own, run on fake tensors: they have a shape and a dtype but no numbers. So it takes a second and
needs no accelerator, yet allocates and frees what a real step does, and a ledger counts every byte that is alive. No
constant is fitted: the few that there are come from PyTorch's source. What torch.compile saves is not predicted.
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import train
from model import GPT
from nanoladder import machine, optim
from nanoladder.data.batches import tokens_seen
from nanoladder.errors import BadInput
from nanoladder.machine import choose_dtype
from nanoladder.run import faults

CUDA_BLOCK = 512  # bytes; the CUDA allocator rounds every tensor up to a multiple of it
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process's tensors in a step, when the optimizer has its state: from the second step on.

    activations: what the forward of one micro-batch leaves for the backward, with autocast's half-precision copies of
    the weights. block: what one transformer block leaves of them. temporary: how far the peak is above the end of the
    forward. The parts add up to the peak only where gradients are there during the forward; where they are dropped
    between steps they grow while activations go, and are a part of temporary.
    """

    weights: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    block: int
    temporary: int
    peak: int


class Ledger(TorchDispatchMode):
    """Counts the bytes of the storages that are alive (now), and the most there ever were (peak)."""

    def __init__(self, on_cuda):
        super().__init__()
        self.on_cuda = on_cuda
        self.alive = weakref.WeakSet()
        self.now = self.peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it calls what has bytes itself
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.alive:
                self.enter(tensor.untyped_storage())
        self.peak = max(self.peak, self.now + self.inside(operator, args))
        return result

    def enter(self, storage):
        size = storage.nbytes()
        if self.on_cuda:
            size = math.ceil(size / CUDA_BLOCK) * CUDA_BLOCK
        self.alive.add(storage)
        self.now += size
        weakref.finalize(storage, self.leave, size)

    def leave(self, size):
        self.now -= size

    def inside(self, operator, args):
        """Bytes that a kernel allocates for itself and frees before it returns, where they count."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dim()]
        if self.on_cuda:  # the backward of fused attention adds up dq in float32 (mha_bwd in PyTorch's flash_api.cpp)
            fused = "attention_backward" in operator.name() and tensors[0].itemsize == 2
            return 4 * tensors[0].numel() if fused else 0
        if torch.Tag.pointwise not in operator.tags or len({tensor.dtype for tensor in tensors}) < 2:
            return 0
        # Operands of two dtypes are first copied to the common one on a CPU (TensorIterator); CUDA casts as it reads.
        common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return sum(common.itemsize * tensor.numel() for tensor in tensors if tensor.dtype != common)


@contextlib.contextmanager
def like_cuda(attention):
    """Inside, the model takes CUDA's path through PyTorch on tensors of the CPU, wherever the two differ.

    A PyTorch that finds no GPU cannot run a backward on fake CUDA tensors (2.13), so a step is traced on the CPU.
    """
    softmax, dropout = torch.Tensor.softmax, F.dropout

    def attend(q, k, v, dropout_p, is_causal):
        if q.itemsize == 2 and attention != "efficient":  # cuDNN's kernel keeps what flash keeps
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal)[0]

    def softmax_in_float32(x, dim):  # by autocast, there and not on a CPU
        return softmax(x.float() if torch.is_autocast_enabled("cpu") else x, dim)

    def dropout_by_bool(x, p, training, inplace):  # the mask is bool there; on a CPU it has the dtype of x
        return torch.native_dropout(x, p, True)[0] if p and training else dropout(x, p, training, inplace)

    with (
        patch.multiple(F, scaled_dot_product_attention=attend, dropout=dropout_by_bool),
        patch.object(torch.Tensor, "softmax", softmax_in_float32),
    ):
        yield


def cublas_workspaces():
    """Bytes of cuBLAS's workspaces: one for the forward's thread, one for the backward's (CublasHandlePool.cpp)."""
    large = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)
    return int(2 * 2**20 * (32 if large else 8.125))  # Hopper and Blackwell of data centers, or any other


def predict_memory(config, device_type="cpu", world_size=1):
    """Memory of a step of `config` in one of world_size processes, all operations eager.

    On "cuda", bytes as torch.cuda.max_memory_allocated counts them: without CUDA's own context (about half a GB) and
    what the allocator keeps free. Where there is no GPU to ask, it is taken for a Hopper or Blackwell.
    """
    if device_type not in ("cpu", "cuda"):
        raise BadInput(f"device={device_type}: memory is predicted for cpu and cuda")
    if config.vocab_size == 0:
        raise BadInput("vocab_size=0: memory depends on it; expected a number, such as --vocab_size=50257")
    if config.micro_batch_size == "auto":
        raise BadInput("micro_batch_size=auto is found by training; to predict memory a number is expected, such as 8")
    if config.batch_size % world_size:
        raise BadInput(f"batch_size={config.batch_size} does not divide among world_size={world_size} processes")
    config = of_one_process(config, world_size)
    several = config.micro_batch_size < config.batch_size
    in_buckets = world_size > 1 and config.shard == "none"  # DDP's, which stay
    traced = dataclasses.replace(
        config,
        batch_size=config.micro_batch_size,
        # The second micro-batch finds gradients in any case
        set_to_none=config.set_to_none and not several and not in_buckets,
        dtype=product_dtype(config, device_type),
        # What allocates nothing, or cannot be traced: one trace for all.
        **{"stage": "", "lazy_metrics": True, "num_workers": 0, "keep_memory": True, "matmul_precision": "highest"},
        **{"compile": False, "ddp": False},
    )
    memory = trace(traced, device_type)
    n_batches = 1 + (config.num_workers > 0)  # loader processes keep one ahead
    inputs = n_batches * config.batch_size // config.micro_batch_size * memory.inputs
    memory = dataclasses.replace(memory, inputs=inputs, peak=memory.peak + inputs - memory.inputs)
    return sharded(memory, config, world_size)


def of_one_process(config, world_size):
    """The config with the batch and the micro-batch of one of world_size processes."""
    batch_size = config.batch_size // world_size
    micro_batch_size = min(config.micro_batch_size or batch_size, batch_size)
    return dataclasses.replace(config, batch_size=batch_size, micro_batch_size=micro_batch_size)


def product_dtype(config, device_type):
    """The name of the dtype of products; auto is taken for half precision on a GPU, where bytes are all that counts."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if device_type == "cuda" else str(choose_dtype("auto", torch.device("cpu"))).split(".")[1]


@functools.cache
def trace(config, device_type):
    """Memory of train_step on fake tensors; the whole batch is one micro-batch."""
    ledger = Ledger(device_type == "cuda")
    path = like_cuda(config.attention) if ledger.on_cuda else contextlib.nullcontext()
    if config.optimizer == "adamw8bit":
        know_fractions()
    sure = patch.object(faults, "may_update", lambda *_: True)  # there are no values to look at
    numbers = patch.object(torch.Tensor, "item", lambda _: 1.0)  # Adafactor reads some, and fake tensors have none
    with FakeTensorMode(), ledger, path, sure, numbers:
        model = GPT(config)
        weights = ledger.now
        optimizer = train.build_optimizer(model, config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = ledger.now - weights
        optimizer.step()  # makes the state
        state = ledger.now - weights - gradients
        if config.optimizer_in_backward:
            gradients = max(parameter.grad.nbytes for parameter in model.parameters())
            optimizer.zero_grad()
            optim.update_in_backward(optimizer)
        batch = torch.empty(2, config.batch_size, config.context_length, dtype=torch.long).unbind()

        whole, block = watch(model, ledger), watch(model.blocks[0], ledger)
        optimizer.scaler = torch.amp.GradScaler("cpu", enabled=False)  # enabled, it holds a few scalars
        ledger.peak = 0
        train.train_step(model, optimizer, batch, config.learning_rate, config)
    (start, end), (block_start, block_end) = whole[:2], block[:2]  # later ones are recomputed
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


def know_fractions():
    """Has torchao compute the fractions that codes stand for, once: not by tensors without numbers."""
    machine.eight_bit_library(torch.device("cpu"))
    from torchao.optim.subclass_8bit import OptimState8bit

    for signed in (False, True):
        OptimState8bit.zeros(256, signed)


def watch(module, ledger):
    """A list that grows with every forward of the module: bytes alive before it, bytes alive after it."""
    moments = []
    module.register_forward_pre_hook(lambda *_: moments.append(ledger.now))
    module.register_forward_hook(lambda *_: moments.append(ledger.now))
    return moments


def sharded(memory, config, world_size):
    """Memory of one process of world_size, each of which keeps its part of what config.shard says: an estimate.

    Optimizer state and gradients are shared; weights too, but for the forward and backward they are gathered: all of
    them with shard=optimizer; with full those of two blocks (one computes, the next comes) and what is outside blocks.
    """
    if config.shard == "none" or world_size == 1:
        return memory
    outside = 4 * config.n_embd * (config.vocab_size + config.context_length)  # float32
    whole = min(outside + 2 * (memory.weights - outside) // config.n_layer, memory.weights)
    gathered = memory.weights if config.shard == "optimizer" else whole
    parts = {
        "weights": min(gathered + memory.weights // world_size, memory.weights),
        "gradients": whole + max(memory.gradients - whole, 0) // world_size,
        "optimizer": memory.optimizer // world_size,
    }
    gone = {key: getattr(memory, key) - size for key, size in parts.items()}
    resident = memory.weights + memory.gradients + memory.optimizer + memory.inputs + memory.activations
    if resident > memory.peak - memory.temporary:  # gradients are dropped between steps: not there in the forward
        gone.pop("gradients", None)
    return dataclasses.replace(memory, **parts, peak=memory.peak - sum(gone.values()))


def divisors(n):
    return [size for size in range(1, n + 1) if n % size == 0]


def largest_micro_batch(config, memory_bytes, device_type="cpu", world_size=1):
    """The largest micro_batch_size, of those that divide a process's batch, whose peak fits; 0 where none does."""
    batch_size = config.batch_size // world_size
    sizes = [0, *divisors(batch_size)]

    def memory(index):
        sized = dataclasses.replace(config, micro_batch_size=sizes[index])
        return predict_memory(sized, device_type, world_size)

    low, high = 0, len(sizes) - 1
    most = memory(high)
    if most.peak <= memory_bytes:
        return sizes[high]
    peaks = {low: most.weights + most.gradients + most.optimizer, high: most.peak}
    while high - low > 1:  # sizes[low] fits, sizes[high] does not; between them memory is nearly a straight line
        share = (memory_bytes - peaks[low]) / (peaks[high] - peaks[low])
        guess = bisect.bisect(sizes, sizes[low] + share * (sizes[high] - sizes[low])) - 1
        middle = min(max(guess, low + 1), high - 1)
        peaks[middle] = memory(middle).peak
        low, high = (middle, high) if peaks[middle] <= memory_bytes else (low, middle)
    return sizes[low]


def block_activations(config, device_type="cpu"):
    """Bytes that a block keeps of a micro-batch, by the formula of Korthikanti et al. 2022 (equation 2).

    It is s·b·h·(34 + 5·a·s/h) bytes for s tokens, b sequences, width h and a heads, in half precision with dropout:
    two bytes a number and one a mask are in the 34 and the 5. Here also without dropout (no masks), in float32 (four
    bytes) and with fused attention (no a·s/h). A traced block keeps more under autocast, where the residual stream
    stays float32 and the weights are kept in half precision too, and less where it is recomputed.
    """
    s, b, h, a = config.context_length, config.micro_batch_size or config.batch_size, config.n_embd, config.n_head
    number, mask = 4 if product_dtype(config, device_type) == "float32" else 2, int(config.dropout > 0)
    linear = 16 * number + 2 * mask  # what norms, products and GELU read
    quadratic = number + mask * (number + 1) if config.attention == "matmul" else 0  # softmax, then its dropout
    return s * b * h * linear + a * s * s * b * quadratic


def costs(config, mfu=0.4, peak_flops=989e12, world_size=1):
    """What the run of a config takes.

    n_params, flops_per_token and tokens; pf_days, of 86400·10¹⁵ FLOP each; and the hours on world_size devices that do
    a share of mfu of peak_flops (FLOP/s; the default is an H100's and H200's in bfloat16).
    """
    with FakeTensorMode():
        model = GPT(config)
    n_params, flops_per_token = model.n_params(), model.flops_per_token()
    tokens = tokens_seen(config.max_steps, config)
    return {
        "n_params": n_params,
        "flops_per_token": flops_per_token,
        "tokens": tokens,
        "pf_days": flops_per_token * tokens / (1e15 * 86400),
        "hours": flops_per_token * tokens / (mfu * peak_flops * world_size * 3600),
    }


def report(config, rows, device_type="cpu", memory_gb=0.0, mfu=0.4, peak_flops=989e12, world_size=1):
    """The text of what a run of `config` costs and of the memory of every row (name, config), with vocab_size known.

    With memory_gb (1e9 bytes), also the largest micro-batch that fits into it.
    """
    cost = costs(config, mfu, peak_flops, world_size)
    each = f" in each of {world_size} processes" if world_size > 1 else ""
    lines = [
        f"{cost['n_params'] / 1e6:.1f} M parameters, {cost['flops_per_token'] / 1e9:.3f} GFLOP a token",
        f"{cost['tokens'] / 1e9:.3f} G tokens in {config.max_steps} steps: {cost['pf_days']:.3g} PF-days, "
        f"{cost['hours']:.3g} hours at {mfu:.0%} of {world_size} × {peak_flops / 1e12:.0f} TFLOP/s",
        f"predicted GB of tensors on {device_type}{each} (formula: what a block keeps by Korthikanti et al. 2022)",
        "",
    ]
    parts = ["weights", "gradients", "optimizer", "activations", "temporary", "peak"]
    table = [["stage", *parts, "B/param", "block MB", "formula MB"] + [f"fits {memory_gb:g} GB"] * (memory_gb > 0)]
    for name, row in tqdm(rows, unit="stage", leave=False):
        memory = predict_memory(row, device_type, world_size)
        formula = block_activations(of_one_process(row, world_size), device_type)
        cells = [name + "*" * row.compile, *(f"{getattr(memory, part) / 1e9:.3f}" for part in parts)]
        cells += [f"{memory.peak / cost['n_params']:.1f}", f"{memory.block / 1e6:.1f}", f"{formula / 1e6:.1f}"]
        if memory_gb > 0:
            fitting = largest_micro_batch(row, memory_gb * 1e9, device_type, world_size)
            cells.append(f"{fitting} of {row.batch_size // world_size}" if fitting else "nothing")
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for stage, *cells in table:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([stage.ljust(widths[0]), *padded]))
    if any(row.compile for _, row in rows):
        lines.append("* predicted as if it were not compiled")
    return "\n".join(lines)
