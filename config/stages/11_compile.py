"""Chains of elementwise operations are compiled to one kernel each.

What: `torch.compile` on the whole model, or on one block that all others reuse if between blocks weights or activations
are exchanged, or weights updated.
Why: norms, GELU, residuals, dropout and the loss are bound by memory bandwidth; fused, they read and write once.
Cost: seconds to minutes before the first step (a cache shortens the next start), and on a CPU a C++ compiler.
Results differ in the last bits, and dropout draws other random numbers.
Tried: we let the compiler write the matrix products as well, from its C++ templates, and measured no significant gain:
1.31 and 1.40 s a step, 1.37 and 1.42 without.
Try: `python train.py config/recipe_small.py --max_steps=40 --eval_windows=16 --out_dir=out/compiled`: the first ten
steps include the compiler's seconds, the next take fewer milliseconds than with `--compile=False`.
Source:
- Ansel et al. 2024, "PyTorch 2": https://doi.org/10.1145/3620665.3640366
- torch.compile: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

compile = True
