"""Private APIs of PyTorch, whose names begin with an underscore, and what breaks without each.

The scripts and nanoladder/ use no others (tests/test_house.py checks this); operators/private.py has those of the
operators and of model.py. If one is gone, importing this module fails only where nothing could replace it. lab/ names
its own where it uses them: it traces PyTorch from within, through the dispatcher, fake tensors and the compiler.
Without those it cannot measure or predict, but training works.
"""

import contextlib
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn

# Collectives with gradients, for compiled programs. Without them no sequence can be split among processes. The first
# has a new name since 2.13, where the old one warns.
all_gather_autograd = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
all_to_all_autograd = collectives.all_to_all_single_autograd

# Settings of the allocator of CUDA memory; 2.11 has the second name. Without both it stays as it is.
set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
set_allocator = set_allocator or getattr(torch.cuda.memory, "_set_allocator_settings", lambda settings: None)


# Frees cuBLAS's workspaces. Without it a captured step also keeps the first step's: 64 MB on Hopper.
clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)


def multiplies_bfloat16() -> bool:
    """True if the CPU has bfloat16 instructions that oneDNN can use. Without the names, False: float32 is used."""
    with contextlib.suppress(AttributeError):
        return torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


def attention_backend(q: torch.Tensor, **options: Any) -> int | None:
    """Number (SDPBackend) of the kernel that PyTorch chooses for self-attention of q; None without the name."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    return choose and choose(q, q, q, **options)


def compile_tanh_by_exp() -> None:
    """Makes compiled code for a CPU compute tanh by exp. Without the name GELU takes 3 to 4 % of a step longer."""
    from torch._inductor import config  # imported late: the compiler takes a second to load

    if hasattr(config.cpp, "use_decompose_tanh"):
        config.cpp.use_decompose_tanh = True


def loaded_compiler() -> ModuleType | None:
    """torch._dynamo if it is loaded, else None: loading it takes a second. Without the name, None: then a compiler
    failure ends in a traceback, and the compiled code of larger micro-batches stays in memory.
    """
    return sys.modules.get("torch._dynamo")


def compiled_libraries() -> list[tuple[Path, Any]]:
    """Lists the libraries in the compiler's cache as (path, the compiler's lock on it). Without the names, which tell
    where and how it locks, the list is empty: libraries that are cut off stay.
    """
    with contextlib.suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import cache_dir
        from torch.utils._filelock import FileLock

        paths, locks = Path(cache_dir()).glob("*/*.so"), Path(cache_dir(), "locks")
        return [(path, FileLock(locks / f"{path.name.partition('.')[0]}.lock", timeout=0)) for path in paths]
    return []


def keep_address(tensor: torch.Tensor) -> None:
    """Tells the compiler that a tensor stays where it is. Without the name CUDA graphs copy it at every step."""
    getattr(torch._dynamo, "mark_static_address", lambda tensor: None)(tensor)


def set_timeout(seconds: float, but: Any) -> None:
    """Sets the time limit of later collectives in all groups but one. Without the names it stays as it was."""
    c10d = torch.distributed.distributed_c10d
    with contextlib.suppress(AttributeError):
        for group in c10d._world.pg_map:
            if group is not but:
                c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class OrderedDataParallel(nn.parallel.DistributedDataParallel):
    """DDP (Li et al. 2020) in which a gradient has the same place in the same bucket in every step.

    By default DDP reorders the buckets after the first step, and with three or more processes a gradient's place
    decides in which order it is summed, and so how it is rounded. Without the names a resumed run, which has a first
    step of its own, differs from an uninterrupted one.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.broadcast_buffers = False  # they are constants
        getattr(self.reducer, "_push_all_rebuilt_params", lambda: None)()  # the order for good

    def _build_params_for_reducer(self):
        """The parameters in the order in which their gradients are ready: the last layer's first."""
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]
