"""Logits are limited to ±15 by a tanh.

Stands on: smear

What: `15 · tanh(logits / 15)`, in the loss's operator too.
Why: the loss cannot be lowered by ever larger logits.
Cost: a tanh in the passes of the loss's operator; without chunks, passes over the logits.
Source:
- Gemma Team 2024, "Gemma 2": https://arxiv.org/abs/2408.00118
"""

logit_softcap = 15.0
