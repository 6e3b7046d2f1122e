"""Gradients are dropped between steps, not zeroed: one pass over memory less, and less memory in the forward.

What: `zero_grad(set_to_none=True)`. The backward then stores each gradient instead of adding it to zeros.
Why: zeroing writes, and adding reads, as many bytes as the model has gradients; a dropped gradient takes no
memory while the activations of the next forward grow.
Cost: none. A parameter that got no gradient is skipped by the optimizer, where a zero one would be decayed.
Source:
- PyTorch's performance tuning guide: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
- torch.optim.Optimizer.zero_grad: https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

set_to_none = True
