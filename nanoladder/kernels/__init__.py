"""Operators of our own: tensors and numbers in, tensors out; no modules, no parameters, no config.

head_loss is the output head and the cross-entropy in one, in bounded memory; model.py calls it.
"""

from nanoladder.kernels.loss import count_chunks, head_loss

__all__ = ["count_chunks", "head_loss"]
