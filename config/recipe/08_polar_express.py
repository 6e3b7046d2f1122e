"""Muon takes four iterations, with the coefficients of Polar Express.

What: each iteration has a polynomial of its own, the best for the singular values that those before have left.
Why: a fifth of Muon's products less. Singular values end between 0.4 and 1.6, not between 0.7 and 1.2 as after five
iterations of one polynomial, and the loss is no worse for it.
Cost: none.
Source:
- Amsel et al. 2025, "The Polar Express": https://arxiv.org/abs/2505.16932
"""

polar_express = True
