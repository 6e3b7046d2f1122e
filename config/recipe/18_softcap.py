"""Logits are capped at ±15 by a tanh.

Stands on: smear

What: `15 · tanh(logits / 15)`, in the fused loss as well.
Why: ever larger logits cannot lower the loss.
Cost: a tanh in each pass of the fused loss; without chunks, extra passes over the logits.
Try: `python -c "import torch; print(15 * torch.tanh(torch.tensor([1.0, 10.0, 100.0]) / 15))"` prints 0.9985, 8.7417 and
15: small logits pass, large ones are capped.
Source:
- Gemma Team 2024, "Gemma 2": https://arxiv.org/abs/2408.00118
"""

logit_softcap = 15.0
