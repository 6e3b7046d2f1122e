"""Muon updates the blocks' matrices by their orthogonalized momentum.

What: AdamW keeps all other weights. Updates have its usual size, so that both share a learning rate. The momentum
rises from 0.85 to 0.95 over the first 300 steps.
Why: a matrix's momentum has nearly a low rank, so that few directions are learned; orthogonalized, all are alike.
Cost: five products of matrices of each weight's size a step; one moment instead of two.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
- Liu et al. 2025, "Muon is Scalable for LLM Training": https://arxiv.org/abs/2502.16982
"""

optimizer = "muon"
