"""Gradients are freed between steps, not zeroed.

What: `zero_grad(set_to_none=True)`. The backward then stores each gradient instead of adding it to zeros.
Why: zeroing writes, and adding reads, as many bytes as the model has gradients. A freed gradient takes no memory
while the activations of the next forward build up.
Cost: none. The optimizer skips a parameter that got no gradient, but would decay one whose gradient is zero.
Tried: we looked for a gain in time on two CPUs and could measure none; it saved less than 1 % of the bytes.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=H100 --vocab_size=50257 --batch_size=32 --micro_batch_size=0
--stages=set_to_none` predicts the peak of memory, which falls by the size of the gradients, 0.5 GB.
Source:
- PyTorch's performance tuning guide: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
- torch.optim.Optimizer.zero_grad: https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

set_to_none = True
