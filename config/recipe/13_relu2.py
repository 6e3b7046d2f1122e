"""The MLP's activation is the square of ReLU.

Stands on: smear

What: `F.relu(x).square()` instead of GELU.
Why: found by a search over programs; most of its outputs are zero. It gains at one loss and not at a
lower one (docs/recipe.md, "By loss").
Cost: none; cheaper than GELU.
Try: `python -c "import torch; x = torch.randn(10**6).relu().square(); print((x == 0).float().mean())"`: half of its
outputs are zero, where GELU has none.
Source:
- So et al. 2021, "Primer": https://arxiv.org/abs/2109.08668
"""

activation = "relu2"
