"""Operators of our own: tensors and numbers in, tensors out; no modules, no parameters, no config.

head_loss is the output head and the cross-entropy in one, in bounded memory, and sampled_loss the same over a part of
the vocabulary; attend_in_blocks is causal attention for CPUs. model.py calls them.
"""

from operators.attention import attend_in_blocks, count_scores, uses_blocks
from operators.loss import count_chunks, head_loss, triton_obstacle
from operators.sampled import sampled_loss
