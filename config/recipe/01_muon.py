"""Muon updates the blocks' matrices by their orthogonalized momentum.

What: AdamW updates all other weights. For a matrix W of n × m with gradient G:

    M ← μ M + (1 - μ) G                     momentum: μ rises from 0.85 to 0.95 over the first 300 steps
    X = μ M + (1 - μ) G, X ← X / ‖X‖        Nesterov's, scaled to singular values of at most 1
    five times: A = X Xᵀ, X ← a X + (b A + c A²) X, with a, b, c = 3.4445, -4.7750, 2.0315
    W ← (1 - lr · decay) W - lr · 0.2 √max(n, m) · X

The third line is a Newton–Schulz iteration: it maps each singular value s to a s + b s³ + c s⁵, and all of them end
near 1. The factor 0.2 √max(n, m) gives the update AdamW's usual size, so that both share a learning rate.
Why: the momentum of a matrix has nearly low rank, so few directions are learned; orthogonalized, all count alike.
Cost: five iterations of matrix products of each weight's size, every step; one moment instead of two.
Try: `python -c "import torch; from nanoladder.optim.muon import *;
print(torch.linalg.svdvals(orthogonalize(NEWTON_SCHULZ, torch.randn(1, 6, 4))))"` prints the singular values that Muon
makes of a random matrix's: all between 0.6 and 1.2.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
- Liu et al. 2025, "Muon is Scalable for LLM Training": https://arxiv.org/abs/2502.16982
"""

optimizer = "muon"
