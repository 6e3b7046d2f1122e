"""Traces the memory and the operations of train.py's step without running it.

The step runs on fake tensors, which have a shape and a dtype but no numbers. That takes seconds and no accelerator, yet
allocates and frees what a real step does, compiled or not, and a ledger counts the bytes that are alive. Nothing is
fitted to measurements; the few constants are PyTorch's. One process of many is traced by itself, with the code that
cuts its model and gathers its weights: the messages that it receives are fake too.
"""

import contextlib
import dataclasses
import itertools
import math
import weakref
from functools import lru_cache, partial, reduce
from operator import itemgetter

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import train
from lab.predict import patches, roofline
from lab.predict.simulated_rank import one_of
from nanoladder import machine, parallel
from nanoladder.data import Batch
from operators import attention, loss

CUDA_BLOCK = 512  # bytes; CUDA's allocator rounds every tensor up to a multiple of this
IN_BLOCKS = {  # {operator: the function that it runs}
    torch.ops.nanoladder.attend.default: attention.forward,
    torch.ops.nanoladder.attend_backward.default: attention.backward,
}
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process's tensors in a step, from the second step on, when the optimizer has its state.

    weights: the process's own, and gathered ones at the end of the forward. activations: kept for the backward by the
    forward of one micro-batch, or in a pipeline of all micro-batches in flight, with autocast's half-precision copies
    of the weights. temporary: the peak less all bytes alive at the end of the forward. The parts add up
    to the peak if gradients are kept between steps; if they are dropped, they grow while activations are freed, and are
    within temporary.
    """

    weights: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    temporary: int
    peak: int


class Ledger(TorchDispatchMode):
    """Counts the bytes of all storages that are alive (now), their maximum over time (peak), and the operations."""

    supports_higher_order_operators = True  # operators that call another one, in compiled programs

    def __init__(self, on_cuda):
        super().__init__()
        self.on_cuda = on_cuda
        self.alive = weakref.WeakKeyDictionary()  # {storage: its bytes}
        self.numbers = weakref.WeakKeyDictionary()  # {storage: its number}
        self.now = self.peak = self.n_storages = 0
        self.operations, self.repeated, self.opaque = [], False, False
        self.gradient_sum = None  # a weak reference to the first addend, and the bytes alive with the sum

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a wrapper has no bytes: its inner tensors come by themselves
        if operator is torch.ops.nanoladder.chunked_loss.default:
            with self, self.noting("opaque"):
                return loss.compute(*args)  # its operations, as it is opaque
        self.settle_gradient_sum()
        result = operator(*args, **(kwargs or {}))
        self.note(operator, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            if counts(tensor) and tensor.untyped_storage() not in self.alive:
                self.add(tensor.untyped_storage())
        if in_backward() and operator is aten.add.Tensor and can_hold_sum(args[0]):
            self.gradient_sum = weakref.ref(args[0].untyped_storage()), self.now
        else:
            self.peak = max(self.peak, self.now + self.scratch(operator, args))
        return result

    def note(self, *call):
        """Appends the roofline.Operation of a call to the list, if it moves anything."""
        state = {"on_cuda": self.on_cuda, "repeated": self.repeated, "opaque": self.opaque}
        operation = roofline.count(*call, number=self.number, **state)
        self.operations += [operation] if operation else []

    def number(self, storage):
        """The number of a storage: they are numbered in the order in which they are seen."""
        if storage not in self.numbers:
            self.numbers[storage] = self.n_storages
            self.n_storages += 1
        return self.numbers[storage]

    @contextlib.contextmanager
    def noting(self, flag):
        """Sets a flag of the operations for a while: repeated or opaque."""
        setattr(self, flag, True)
        yield
        setattr(self, flag, False)

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
        self.number(storage)
        size = self.alive[storage] = [0]
        weakref.finalize(storage, self.resize, size, 0)
        self.resize(size, storage.nbytes())

    def resize(self, size, n_bytes):
        """Counts a storage as n_bytes. size: [bytes counted for it so far]."""
        if self.on_cuda:
            n_bytes = math.ceil(n_bytes / CUDA_BLOCK) * CUDA_BLOCK
        self.now += n_bytes - size[0]
        size[0] = n_bytes

    def resized(self, storage):
        """Counts a storage anew, after it was emptied or filled in place."""
        if storage in self.alive:
            self.resize(self.alive[storage], storage.nbytes())
            self.peak = max(self.peak, self.now)

    def end_forward(self, ends):
        """Appends (bytes alive, [(storage, bytes)]) to the ends. The peak up to the first end becomes forward_peak."""
        ends.append((self.now, [(weakref.ref(storage), size[0]) for storage, size in self.alive.items()]))
        if len(ends) == 1:
            self.forward_peak, self.peak = self.peak, self.now

    def scratch(self, operator, args):
        """Bytes that a kernel allocates for itself and frees before it returns, for the kernels that take many."""
        if isinstance(operator, HigherOrderOperator):
            return 0
        if operator in IN_BLOCKS:
            return self.scratch_in_blocks(IN_BLOCKS[operator], args)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dim()]
        if operator is aten._softmax_backward_data.default and self.on_cuda:  # gradient · output (SoftMax.cu)
            return tensors[0].nbytes
        if self.on_cuda:  # fused attention's backward sums dq in float32 (mha_bwd in PyTorch's flash_api.cpp)
            fused = "attention_backward" in operator.name() and tensors[0].itemsize == 2
            return 4 * tensors[0].numel() if fused else 0
        if torch.Tag.pointwise not in operator.tags or len({tensor.dtype for tensor in tensors}) < 2:
            return 0
        # A CPU copies operands of two dtypes to their common one first (TensorIterator); CUDA casts as it reads.
        common = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return sum(common.itemsize * tensor.numel() for tensor in tensors if tensor.dtype != common)

    def scratch_in_blocks(self, function, args):
        """Bytes that block attention holds besides its results, for a few heads at a time.

        Counts the first two parts of the heads: the copies of one part live until the next part's replace them.
        """
        *_, part = itertools.islice(attention.heads_at_a_time(args[0]), 2)
        both = tuple(slice(0, indices.stop) for indices in part)  # (sequences, heads)
        args = [arg[both] if isinstance(arg, torch.Tensor) and arg.dim() == 4 else arg for arg in args]
        with Ledger(self.on_cuda) as inner:
            inner.alive.update({arg.untyped_storage(): [0] for arg in args if isinstance(arg, torch.Tensor)})
            results = function(*args)
        return inner.peak - sum(result.untyped_storage().nbytes() for result in results)


def in_backward():
    """True in a backward pass, except in a forward that is recomputed there."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def counts(result):
    """True for a tensor with storage; tensors on the meta device have none."""
    return isinstance(result, torch.Tensor) and result.device.type != "meta"


def can_hold_sum(tensor):
    return not tensor._is_view() and aten.is_non_overlapping_and_dense(tensor)


def cublas_workspaces() -> int:
    """Bytes of cuBLAS's workspaces: one for the forward's thread, one for the backward's (CublasHandlePool.cpp)."""
    large = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)
    return int(2 * 2**20 * (32 if large else 8.125))  # Hopper and data-center Blackwell, or any other


@lru_cache(maxsize=16)  # of some MB each
def trace(config, device_type, world_size, rank):
    """(Memory, Work) of train.py's step on fake tensors in process `rank` of world_size. Only here is train.py called.

    config: its batch_size is the process's.
    """
    ledger, ends = Ledger(device_type == "cuda"), []
    if config.optimizer == "adamw8bit":
        build_8bit_tables()
    with fake_step(config, device_type, world_size, rank, ledger):
        model = train.build_model(config, torch.device("cpu"))
        weights = ledger.now
        optimizer = train.build_optimizer(model, config)
        scaler = train.build_scaler(config, torch.device("cpu"))
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in learning:
            parameter.grad = torch.zeros_like(parameter)
        gradients = ledger.now - weights
        optimizer.step()  # creates the optimizer's state
        state = ledger.now - weights - gradients
        if config.optimizer_in_backward:
            gradients = max(parameter.grad.nbytes for parameter in learning)
            optimizer.zero_grad()
        n_positions = config.context_length // parallel.mesh().sizes.context
        batch = Batch(*torch.empty(2, config.batch_size, n_positions, dtype=torch.long).unbind())
        for part in getattr(model, "parts", [model]):  # a process of a pipeline has parts
            patches.after_forwards(part, partial(ledger.end_forward, ends))
        ledger.peak, ledger.forward_peak, ledger.operations, first = 0, 0, [], ledger.n_storages
        train.train_step(model, optimizer, scaler, batch, config.learning_rate, config)
        work = roofline.Work(tuple(ledger.operations), first, frozenset(ledger.numbers.values()))
        end, sizes = max(ends, key=itemgetter(0)) if config.pipeline_parallel > 1 else ends[0]  # later ones recompute
        # Weights gathered from others: storages that FSDP2 has emptied since
        gathered = sum(size for storage, size in sizes if storage() is not None and storage().nbytes() == 0)
        kept = 0 if config.set_to_none or config.optimizer_in_backward else gradients
    inputs = sum(part.nbytes for part in batch)
    workspaces = cublas_workspaces() if ledger.on_cuda else 0
    if config.cuda_graph:  # whose first forward is captured before the backward's thread has its workspace
        ledger.forward_peak -= workspaces // 2
    peak = max(ledger.forward_peak, ledger.peak) + workspaces
    memory = Memory(
        weights=weights + gathered,
        gradients=gradients,
        optimizer=state,
        inputs=inputs,
        activations=end - weights - gathered - kept - state - inputs,
        temporary=peak - end,
        peak=peak,
    )
    return memory, work


@contextlib.contextmanager
def fake_step(config, device_type, world_size, rank, ledger):
    """Lets train.py run on fake tensors, seen by the ledger, as process `rank` of world_size on such a device."""
    with (
        one_of(world_size, rank, config, device_type),
        torch.random.fork_rng(devices=[]),
        patches.without_kernels(ledger) if config.compile else contextlib.nullcontext(),
        patches.counting_resizes(ledger),
        FakeTensorMode(allow_non_fake_inputs=True),  # a random state is real
        ledger,
        patches.cuda_kernels(ledger.note) if ledger.on_cuda else contextlib.nullcontext(),
        patches.without_numbers(ledger),
    ):
        yield


def build_8bit_tables():
    """Lets torchao compute and cache its quantization tables with real numbers, as fake tensors have none."""
    machine.require_torchao()
    from torchao.optim.subclass_8bit import OptimState8bit

    for signed in (False, True):
        OptimState8bit.zeros(256, signed)
