"""Each block's input is a learned mixture with the token embedding.

What: two learned shares a block, which begin as 1 and 0.
Why: later blocks see the token itself, whatever the stream has become.
Cost: an elementwise pass over the stream a block. Not for tensor parallelism or pipelines.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

x0_skip = True
