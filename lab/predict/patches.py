"""All patches under which the prediction runs train.py's step, in PyTorch and in our own code; no other file has any.

Each says what it replaces, and what breaks if the next PyTorch changes it. A name that is gone fails at once, with an
AttributeError or ImportError; code that no longer calls a name fails only in the tests of tests/lab/predict, which
compare with real steps. `make test-newest` runs them.
"""

import contextlib
import math
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode_temporarily

import model
import train
from nanoladder import optim, parallel
from operators import loss

aten = torch.ops.aten


def do_nothing(*_, **__):
    pass


# -- the step, which reads no numbers


@contextlib.contextmanager
def without_numbers(ledger):
    """Lets train.py's step run on fake tensors, which have no numbers, and tells the ledger what it repeats.

    Replaces Tensor.item (1.0; Adafactor reads some) and Module.to (fake weights are in place); of ours, what decides by
    a loss, and DDP, which is C++. If PyTorch reads numbers in another way, the step fails on a fake tensor.
    """
    with (
        patch.multiple(torch.Tensor, item=lambda _: 1.0),
        patch.multiple(torch.nn.Module, to=lambda module, _: module),
        patch.multiple(optim, check_finite=lambda *_: True),
        patch.multiple(parallel.data_parallel, DistributedDataParallel=lambda module, **_: module),
        patch.multiple(train, forward_backward=ledger.noting("repeated")(train.forward_backward)),
    ):
        yield


def after_forwards(module, function):
    """Calls a function after every forward of a module, compiled or not.

    Replaces _compiled_call_impl, which Module.__call__ runs instead of _call_impl. If it no longer does, no forward is
    seen, and a trace ends in an IndexError.
    """
    forward = module._compiled_call_impl or module._call_impl

    def call(*args, **options):
        result = forward(*args, **options)
        function()
        return result

    module._compiled_call_impl = call


def counting_resizes(ledger):
    """Counts gathered weights, whose storages FSDP2 frees and refills without calling an operator.

    Replaces UntypedStorage.resize_. If FSDP2 frees them in another way, gathered weights count as kept.
    """
    resize_ = torch.UntypedStorage.resize_

    def resize(storage, n_bytes):
        result = resize_(storage, n_bytes)
        ledger.resized(storage)
        return result

    return patch.multiple(torch.UntypedStorage, resize_=resize)


# -- CUDA's kernels


@contextlib.contextmanager
def cuda_kernels(note):
    """Lets the model allocate on CPU tensors as CUDA's kernels do, wherever the two differ.

    PyTorch 2.13 cannot run a backward on fake CUDA tensors unless it finds a GPU, so every step is traced on the CPU.
    Replaces attention, dropout, norms and softmax; of ours, attention in blocks and the head's Triton kernels. If
    CUDA's kernels come to keep other tensors, predicted activations are off. note: Ledger.note, which is told of
    kernels that do not run.
    """
    softmax, dropout, layer_norm, rms_norm = torch.Tensor.softmax, F.dropout, F.layer_norm, F.rms_norm

    def attend(q, k, v, mask=None, dropout_p=0.0, is_causal=True):  # the mask is causal too
        if q.itemsize == 2:  # cuDNN's kernel keeps the same tensors as flash
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal)[0]

    def softmax_in_float32(x, dim):  # CUDA's autocast does this, the CPU's does not
        return softmax(x.float() if torch.is_autocast_enabled("cpu") else x, dim)

    def dropout_by_bool(x, p, training, inplace):  # CUDA's mask is bool, the CPU's has the dtype of x
        return torch.native_dropout(x, p, True)[0] if p and training else dropout(x, p, training, inplace)

    def norm_in_float32(x, shape, weight, bias, eps):  # gathered weights may be in half precision
        weight, bias = (part if part is None else part.float() for part in (weight, bias))
        return layer_norm(x.float(), shape, weight, bias, eps)

    def rms_norm_in_float32(x, shape, weight=None, eps=None):  # CUDA's autocast does this, the CPU's does not
        return rms_norm(x.float(), shape, weight if weight is None else weight.float(), eps)

    def softmax_in_place(logits, *_, **__):  # one kernel, as is the product that is added to the weight's gradient
        note(aten.exp_.default, (logits,), {}, logits)

    def add_product(total, a, b):
        note(aten.addmm_.default, (total, a, b), {}, total)

    def takes_exponentials(hidden, weight):
        from_hopper_on = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
        return from_hopper_on and loss.suits_exponentials(hidden, weight)

    class Exponentials:
        """Stand-in for exp_triton with the same allocations."""

        losses = staticmethod(lambda sums: sums.double().log().float())
        finish = staticmethod(do_nothing)

        @staticmethod
        def target_logits(hidden, weight, columns, scale=None):
            return columns.new_empty(columns.shape, dtype=torch.float32)

        @staticmethod
        def exp_logits(hidden, weight, shifts, n_real, out, scale=None, write=True):
            note(aten.mm.default, (hidden, weight.T), {}, out)
            return shifts.new_empty(len(hidden), math.ceil(len(weight) / 128))  # sums of tiles

    with (
        patch.multiple(F, scaled_dot_product_attention=attend, dropout=dropout_by_bool),
        patch.multiple(F, layer_norm=norm_in_float32, rms_norm=rms_norm_in_float32),
        patch.multiple(torch.Tensor, softmax=softmax_in_float32),
        patch.multiple(model, uses_blocks=lambda *_: False),  # they are for CPUs
        patch.multiple(loss.softmax, softmax_=softmax_in_place),
        patch.multiple(loss, add_product=add_product, takes_exponentials=takes_exponentials),
        patch.multiple(loss, exponential_kernels=lambda: Exponentials),
    ):
        yield


# -- the compiler


@contextlib.contextmanager
def without_kernels(ledger):
    """Lets torch.compile generate its programs on fake tensors, and shows their buffers to the ledger.

    The compiler does all that it does in training, up to the Python program that allocates buffers, launches kernels
    and frees buffers. That program runs with kernels that do nothing; no C++ compiler and no accelerator is needed.

    Replaces torch.compile, the loading and the kernels of the compiler's programs, and what asks for a C++ compiler.
    The programs' own names (call, empty_strided_cpu, ...) are PyTorch 2.13's: under others, their buffers are not seen,
    and predicted peaks are too small.
    """
    from torch._inductor import config as inductor_config  # imported here: the compiler takes a second
    from torch._inductor import cpp_builder, cpu_vec_isa, ir
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    compile, load = torch.compile, PyCodeCache.load_by_key_path

    def compile_without_ledger(function, **options):
        """Dynamo skips code in a dispatch mode that it does not know, and the compiler's tensors are not the step's."""
        compiled = compile(function, **options)

        def call(*args, **keywords):
            with _pop_mode_temporarily():
                return compiled(*args, **keywords)

        return call

    def load_with_ledger(*args, **keywords):
        program = load(*args, **keywords)
        # C++ functions that bypass the dispatcher and therefore fake tensors
        program.empty_strided_cpu = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
        program.reinterpret_tensor = torch.as_strided
        program.assert_size_stride = program.assert_alignment = do_nothing
        call = program.call

        def call_with_ledger(buffers):
            with contextlib.nullcontext() if _get_current_dispatch_mode() is ledger else ledger:
                return call(buffers)

        program.call = call_with_ledger
        return program

    torch._dynamo.reset()  # the same code is compiled at most eight times
    try:
        with (
            patch.multiple(torch, compile=compile_without_ledger),
            patch.multiple(PyCodeCache, load_by_key_path=load_with_ledger),
            patch.multiple(AsyncCompile, cpp_pybinding=lambda *_: do_nothing),
            # Neither vectors nor a compiler's dialect change a buffer, but it takes a C++ compiler to find out.
            patch.multiple(cpu_vec_isa, pick_vec_isa=lambda: cpu_vec_isa.invalid_vec_isa),
            patch.multiple(cpp_builder, is_msvc_cl=lambda: False, is_gcc=lambda: False),
            # For a CPU the compiler stores results that it recomputes for a GPU: in float32 each tanh's.
            patch.multiple(ir, is_cpu=lambda _: not ledger.on_cuda),
            inductor_config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        ):
            yield
    finally:
        torch._dynamo.reset()  # nothing that was compiled without kernels stays


# -- one process of many


@contextlib.contextmanager
def fake_group(world_size, rank):
    """Creates a process group that nobody else has joined, as torchtitan does to estimate memory.

    Replaces all_to_all_single, which fails in such a group if this process sends nothing. Shows no dispatch mode the
    tensors of meshes and positions, which are read, and those on which DTensor tries each new operator whole, which in
    a real process take no memory: if it tries them elsewhere, sharded steps have too high a peak. The backend is one of
    PyTorch's own tests.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            patch.multiple(dist, all_to_all_single=partial(send_something, dist.all_to_all_single)),
            without_modes(dist.DeviceMesh, "__init__"),  # FSDP2 makes meshes too
            without_modes(ShardingPropagator, "_propagate_tensor_meta_non_cached"),
            without_modes(parallel, "apply_context_parallel"),
        ):
            yield
    finally:
        dist.destroy_process_group()


def send_something(all_to_all, output, given, received, sent, group):
    if not len(given):
        given, sent = given.new_zeros(1), [1, *sent[1:]]
    return all_to_all(output, given, received, sent, group)


def without_modes(place, name):
    """Lets a function of a module or class work on real tensors, which no dispatch mode sees."""
    function = getattr(place, name)

    def call(*args, **options):
        with _disable_current_modes():
            return function(*args, **options)

    return patch.object(place, name, call)


def gathering_in(dtype):
    """Lets FSDP2 gather weights in this dtype, as parallel.fully_shard does on CUDA alone.

    Replaces fsdp.MixedPrecisionPolicy, which parallel.fully_shard calls with param_dtype by name.
    """
    from torch.distributed import fsdp

    def policy(param_dtype, **options):
        return original(param_dtype=dtype, **options)

    original = fsdp.MixedPrecisionPolicy
    return patch.multiple(fsdp, MixedPrecisionPolicy=policy)
