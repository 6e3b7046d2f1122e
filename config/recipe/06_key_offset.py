"""The key at a position is that of the token before.

What: after their rotation, keys move on by one position; values stay.
Why: a query that matches a token finds the value of the token that followed it. So one layer looks for the last
occurrence of a token and copies what came next; without the offset that takes two (Olsson et al. 2022).
Cost: a copy of the keys. A cache keeps the last key; processes that share a sequence exchange one.
Source:
- Jordan et al. 2024, modded-nanogpt, "partial key offset": https://github.com/KellerJordan/modded-nanogpt
- Olsson et al. 2022, "In-context Learning and Induction Heads": https://arxiv.org/abs/2209.11895
"""

key_offset = True
