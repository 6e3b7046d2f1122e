"""Traces the memory of a training step: the bytes that train.py's own step allocates and frees, without running it.

The step runs on fake tensors, which have a shape and a dtype but no numbers. That takes seconds and no accelerator, yet
allocates and frees what a real step does, compiled or not, and a ledger counts the bytes that are alive. Nothing is
fitted to measurements; the few constants are PyTorch's.
"""

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

import train
from lab.compiled import without_kernels
from model import GPT
from nanoladder import machine
from nanoladder.data import Batch
from nanoladder.kernels import loss

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
