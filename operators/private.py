"""Private APIs of PyTorch that operators and model.py use, and what breaks without each.

nanoladder/private.py has all others.
"""

import torch
import torch.distributed._functional_collectives as collectives

# Collective for compiled programs; without it no vocabulary can be split among processes. 2.13 warns of the old name.
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor

# Product of scaled float8 matrices; without it there is none. torch.nn.functional.scaled_mm, public since 2.10, cannot
# be compiled before 2.13 (https://github.com/pytorch/pytorch/issues/180604).
scaled_mm = torch.ops.aten._scaled_mm.default

# Gradient of softmax, written into a tensor. Without it attention in blocks needs a formula of its own.
softmax_backward = torch.ops.aten._softmax_backward_data.out

# Kernels of attention. Without a name selective checkpointing computes that kernel's output twice.
attention_kernels = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    if hasattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
]
