"""GPT-2's recipe: AdamW, learned positions, LayerNorm, GELU, tied head.

The learning rate follows a cosine. Its peak, its end and beta2 come from the config: they are tuned before anything is
compared with this rung.
Try: `python train.py config/recipe_small.py --recipe=base --max_steps=200 --eval_interval=200 --out_dir=out/base` ends
with the validation loss that the rungs lower.
Source:
- Radford et al. 2019:
  https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

optimizer = "adamw"
position = "learned"
qk_norm = False
x0_skip = False
value_embedding = False
key_offset = False
split_qkv = False
polar_express = False
embedding_norm = False
embedding_lr = 1.0
scalar_lr = 1.0
smear = False
activation = "gelu"
zero_init = False
schedule = "cosine"
tie_embeddings = True
head_lr = 1.0
sampled_softmax = 0
exclusive_attention = False
