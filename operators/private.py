"""Private APIs of PyTorch that operators and model.py use, and what breaks without each.

nanoladder/private.py has all others.
"""

import torch
import torch.distributed._functional_collectives as collectives

# Collective for compiled programs; without it no vocabulary can be split among processes. 2.13 warns of the old name.
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor

# Gradient of softmax, written into a tensor. Without it attention in blocks needs a formula of its own.
softmax_backward = torch.ops.aten._softmax_backward_data.out

# Kernels of attention. Without a name selective checkpointing computes that kernel's output twice.
attention_kernels = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    if hasattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
]
