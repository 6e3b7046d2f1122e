"""Embeddings learn at four times the rate, without weight decay.

What: token and value embeddings, and a head tied to them, take a multiple of the learning rate.
Why: the rate is chosen for Muon's matrices, but a row of an embedding gets a gradient only if its token occurs.
Cost: none.
Try: `python train.py config/recipe_small.py --recipe=embedding_lr --max_steps=200 --eval_interval=200
--out_dir=out/embedding_lr`, and the same with `--recipe=embedding_norm`: on one seed either may end lower, which is why
rungs are judged on five.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
- Yang et al. 2022, "Tensor Programs V": https://arxiv.org/abs/2203.03466
"""

embedding_lr = 4.0
