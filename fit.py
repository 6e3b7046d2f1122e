"""Predicts the memory of a training step, what fits into a given memory, and what a run costs.

The step is train.py's own, run on fake tensors: they have a shape and a dtype but no numbers. So it takes a second and
needs no accelerator, yet allocates and frees what a real step does, and a ledger counts every byte that is alive. No
constant is fitted.
"""

import contextlib
import dataclasses
import functools
import math
import weakref
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from config import BadInput
from machine import choose_dtype
from model import GPT

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
    recent = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9
    return 2 * 2**20 * (32 if recent else 8.125)  # Hopper and Blackwell, or older


def predict(config, device_type="cpu", shard="none", world_size=1):
    """Memory of a step of `config` in one of world_size processes, all operations eager.

    On "cuda", bytes as torch.cuda.max_memory_allocated counts them: without CUDA's own context (about half a GB) and
    what the allocator keeps free. Where there is no GPU to ask, it is taken for a Hopper or Blackwell.
    shard: what the processes split, none | optimizer (its state) | full (weights and gradients too).
    """
    if device_type not in ("cpu", "cuda"):
        raise BadInput(f"device={device_type}: memory is predicted for cpu and cuda")
    if config.vocab_size == 0:
        raise BadInput("vocab_size=0: memory depends on it; expected a number, such as --vocab_size=50257")
    if config.batch_size % world_size:
        raise BadInput(f"batch_size={config.batch_size} does not divide among world_size={world_size} processes")
    batch_size = config.batch_size // world_size
    micro_batch_size = min(config.micro_batch_size or batch_size, batch_size)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device_type == "cuda" else str(choose_dtype("auto", torch.device("cpu")))
    memory = trace(
        dataclasses.replace(
            config,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            dtype=dtype.removeprefix("torch."),
            # Only one micro-batch is traced. One that follows another finds gradients, whatever zero_grad does.
            set_to_none=config.set_to_none and micro_batch_size == batch_size,
            num_workers=min(config.num_workers, 1),
            # What allocates nothing, or cannot be traced: one trace for all.
            stage="",
            lazy_metrics=True,
            keep_memory=True,
            matmul_precision="highest",
            compile=False,
        ),
        device_type,
    )
    return split(memory, config, shard, world_size)


@functools.cache
def trace(config, device_type):
    """Memory of train_step on fake tensors, one micro-batch."""
    ledger = Ledger(device_type == "cuda")
    path = like_cuda(config.attention) if ledger.on_cuda else contextlib.nullcontext()
    with FakeTensorMode(), ledger, path:
        model = GPT(config)
        weights = ledger.now
        optimizer = train.build_optimizer(model, config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = ledger.now - weights
        optimizer.step()  # makes the state
        state = ledger.now - weights - gradients
        n_batches = 1 + config.num_workers  # loader processes keep one ahead
        batches = torch.empty(n_batches, 2, config.batch_size, config.context_length, dtype=torch.long)
        batch = tuple(batches[0, :, : config.micro_batch_size])

        whole, block = watch(model, ledger), watch(model.blocks[0], ledger)
        scaler = torch.amp.GradScaler("cpu", enabled=False)  # enabled, it holds a few scalars
        ledger.peak = 0
        train.train_step(model, optimizer, scaler, batch, config.learning_rate, config)
    (start, end), (block_start, block_end) = whole[:2], block[:2]  # later ones are recomputed
    workspaces = int(cublas_workspaces()) if ledger.on_cuda else 0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=state,
        inputs=batches.nbytes,
        activations=end - start,
        block=block_end - block_start,
        temporary=ledger.peak - end + workspaces,
        peak=ledger.peak + workspaces,
    )


def watch(module, ledger):
    """A list that grows with every forward of the module: bytes alive before it, bytes alive after it."""
    moments = []
    module.register_forward_pre_hook(lambda *_: moments.append(ledger.now))
    module.register_forward_hook(lambda *_: moments.append(ledger.now))
    return moments


def split(memory, config, shard, world_size):
    """Memory of one process of world_size, each of which keeps its part of what is sharded: an estimate.

    full: of the weights and gradients, those of two blocks (one computes, the next is gathered) and of what is outside
    of the blocks are whole.
    """
    if shard == "none" or world_size == 1:
        return memory
    parts = {"optimizer": memory.optimizer // world_size}
    if shard == "full":
        outside = 4 * config.n_embd * (config.vocab_size + config.context_length)  # float32
        whole = min(outside + 2 * (memory.weights - outside) // config.n_layer, memory.weights)
        for key in ("weights", "gradients"):
            parts[key] = whole + max(getattr(memory, key) - whole, 0) // world_size
    gone = {key: getattr(memory, key) - size for key, size in parts.items()}
    resident = memory.weights + memory.gradients + memory.optimizer + memory.inputs + memory.activations
    if resident > memory.peak - memory.temporary:  # gradients are dropped between steps: not there in the forward
        gone.pop("gradients", None)
    return dataclasses.replace(memory, **parts, peak=memory.peak - sum(gone.values()))
