"""Private APIs of PyTorch, whose names begin with an underscore, and what breaks without each.

The scripts and nanoladder/ have no others (tests/test_house.py). Only those that nothing could replace raise when they
are gone, at the import. lab/ names its own where it uses them: it traces PyTorch from within, by the dispatcher, fake
tensors and the compiler, and without them it cannot measure or predict, while training goes on.
"""

import contextlib
import sys
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.utils import _pytree

# Collectives for compiled programs, the last two with gradients. Without them nothing is cut among processes. The
# first two have new names since 2.13, where the old ones warn.
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
all_gather_autograd = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
all_to_all_autograd = collectives.all_to_all_single_autograd

# Gradient of softmax, written into a tensor. Without it attention in blocks needs a formula of its own.
softmax_backward = torch.ops.aten._softmax_backward_data.out

# Kernels of attention. Without a name selective checkpointing computes that kernel's output twice.
attention_kernels = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    if hasattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
]

# Maps a function over the tensors in nested lists and dicts. Without it checkpoints need a recursion of their own.
tree_map_only = _pytree.tree_map_only

# Moves a list of tensors towards those of another, in one kernel on a GPU. Without it one kernel moves one tensor.
lerp_all = torch._foreach_lerp_

# The tensor () in which a GradScaler keeps its scale. Without the name float16 cannot be trained.
scale_of = attrgetter("_scale")

# Settings of the allocator of CUDA memory; 2.11 has the second name. Without both it stays as it is.
set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
set_allocator = set_allocator or getattr(torch.cuda.memory, "_set_allocator_settings", lambda settings: None)


# Frees the workspaces of cuBLAS. Without the name a recorded step keeps those of the first, 64 MB on Hopper, as well.
clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)


def multiplies_bfloat16():
    """True if the CPU has instructions for bfloat16 that oneDNN may use. Without the names False: then float32."""
    with contextlib.suppress(AttributeError):
        return torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


def attention_backend(q, **options):
    """Number of the kernel (SDPBackend) that attention of q to itself takes; None without the name."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    return choose and choose(q, q, q, **options)


def compile_tanh_by_exp():
    """Makes compiled code for a CPU compute tanh by exp. Without the name GELU takes 3 to 4 % of a step longer."""
    from torch._inductor import config  # here, because it loads the compiler: a second

    if hasattr(config.cpp, "use_decompose_tanh"):
        config.cpp.use_decompose_tanh = True


def loaded_compiler():
    """torch._dynamo, or None if it is not loaded, which takes a second. Without the name None: then a failure of the
    compiler ends in a traceback, and memory for smaller micro-batches still holds the compiled code of larger ones.
    """
    return sys.modules.get("torch._dynamo")


def compiled_libraries():
    """Paths of the libraries in the compiler's cache. Without the name none: those that are cut off stay."""
    with contextlib.suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return list(Path(cache_dir()).glob("*/*.so"))
    return []


def keep_address(tensor):
    """Tells the compiler that a tensor stays where it is. Without the name CUDA graphs copy it at every step."""
    getattr(torch._dynamo, "mark_static_address", lambda tensor: None)(tensor)


class OrderedDataParallel(nn.parallel.DistributedDataParallel):
    """DDP (Li et al. 2020) in which a gradient has the same place in the same bucket in every step.

    By default DDP reorders the buckets after the first step, and with three or more processes the place decides in
    which order a sum is rounded. Without the names a resumed run, which has its own first step, differs from one that
    never stopped.
    """

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.broadcast_buffers = False  # they are constants
        getattr(self.reducer, "_push_all_rebuilt_params", lambda: None)()  # the order for good

    def _build_params_for_reducer(self):
        """The parameters in the order in which their gradients are ready: the last layer's first."""
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]
