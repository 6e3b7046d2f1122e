"""Lets torch.compile generate its programs on fake tensors, and runs them without their kernels.

The compiler does all that it does in training, up to the Python program that allocates buffers, launches kernels and
frees buffers. That program runs with kernels that do nothing, so a ledger of live tensors sees each buffer for as long
as it lives. No C++ compiler and no accelerator is needed.
"""

import contextlib
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily


@contextlib.contextmanager
def without_kernels(ledger):
    """Lets torch.compile work on fake tensors, and shows the buffers of its programs to the ledger.

    The ledger is off while the compiler works: Dynamo skips all code that runs in a dispatch mode it does not know, and
    the compiler's own tensors are not the step's.
    """
    from torch._inductor import config as inductor_config  # imported here: the compiler takes a second
    from torch._inductor import cpp_builder, cpu_vec_isa, ir
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    compile, load = torch.compile, PyCodeCache.load_by_key_path

    def compile_without_ledger(function, **options):
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
            # For a CPU the compiler stores results that it computes again for a GPU: in float32 those of each tanh.
            patch.multiple(ir, is_cpu=lambda _: not ledger.on_cuda),
            inductor_config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        ):
            yield
    finally:
        torch._dynamo.reset()  # nothing that was compiled without kernels stays


def do_nothing(*_, **__):
    pass
