"""Each position uses the key of the previous token.

What: after the rotation, keys shift by one position; values stay in place.
Why: a query that matches a token finds the value of the token that followed it. So a single layer can find the last
occurrence of a token and copy what came next; without the offset that takes two (Olsson et al. 2022).
Cost: a copy of the keys. A cache keeps the last key; processes that share a sequence exchange one.
Try: `python train.py config/recipe_small.py --recipe=key_offset --max_steps=200 --eval_interval=200
--out_dir=out/offset` ends far below the same with `--recipe=value_embedding`.
Source:
- Jordan et al. 2024, modded-nanogpt, "partial key offset": https://github.com/KellerJordan/modded-nanogpt
- Olsson et al. 2022, "In-context Learning and Induction Heads": https://arxiv.org/abs/2209.11895
"""

key_offset = True
