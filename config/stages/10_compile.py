"""The model is compiled: chains of elementwise operations become one kernel each.

What: `torch.compile` on the whole model, or on the block alone (`compile_scope=block`), which compiles one block
and reuses it: on two CPU cores half of the cold start with 4 blocks, two fifths of it with 12.
`compile_mode` selects CUDA graphs or a search for faster kernels.
Why: norms, GELU, residuals, dropout and the loss are bound by memory; fused, they read and write it once. GELU is
written with a sigmoid then: the same function, and quicker where the compiler has no fast tanh, as on a CPU.
Cost: seconds to minutes before the first step (its cache makes the next start short), and a C++ compiler on a
CPU. Roundings differ, and so does the random stream of dropout.
Source:
- Ansel et al. 2024, "PyTorch 2": https://doi.org/10.1145/3620665.3640366
- torch.compile: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

compile = True
