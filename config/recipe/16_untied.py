"""The head has its own weight; neither it nor the embedding decays.

Stands on: smear

What: `tie_embeddings=False`, with embedding_lr and head_lr as multiples of the learning rate. The head is initialized
like the embedding, or to zero with zero_init.
Why: a row of the embedding gets a gradient only if its token occurs; a row of the head gets one at every token.
Cost: vocabulary × width more parameters and their optimizer state. Not for pipelines.
Try: `python train.py config/recipe_small.py --recipe=untied --compile=False --max_steps=1 --eval_windows=16
--out_dir=out/untied` counts 0.52 million parameters more than `--recipe=smear`: a head of 4,096 × 128.
Source:
- Press & Wolf 2017, for tying: https://arxiv.org/abs/1608.05859
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

tie_embeddings = False
embedding_lr = 4.0
head_lr = 1.0
