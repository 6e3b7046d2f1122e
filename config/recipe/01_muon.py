"""Muon updates the blocks' matrices by their orthogonalized momentum.

What: AdamW updates all other weights. Muon's updates are scaled to AdamW's usual size, so that both share a learning
rate. The momentum rises from 0.85 to 0.95 over the first 300 steps.
Why: the momentum of a matrix has nearly low rank, so few directions are learned; orthogonalized, all count alike.
Cost: five iterations of matrix products of each weight's size, every step; one moment instead of two.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
- Liu et al. 2025, "Muon is Scalable for LLM Training": https://arxiv.org/abs/2502.16982
"""

optimizer = "muon"
