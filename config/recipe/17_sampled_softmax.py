"""In training, only a batch's targets and 512 other tokens have logits.

Stands on: smear

What: the others are drawn anew for each batch and stand for all the rest, so that the sum of the softmax is right on
average. Evaluation and generation use all logits.
Why: in a small model the head takes most of a step, and a batch has few different tokens.
Cost: a noisier gradient, so a step gains a little less, and a training loss that is an estimate. Not for tensor
parallelism, pipelines or CUDA graphs.
Try: `python train.py records/naive_loss/005_one_block/config.py --sampled_softmax=512 --max_steps=200
--eval_interval=200 --out_dir=out/sampled` ends lower, and sooner, than the same with `--sampled_softmax=0
--max_steps=140 --eval_interval=140`.
Source:
- Jean et al. 2015, "On Using Very Large Target Vocabulary": https://arxiv.org/abs/1412.2007
"""

sampled_softmax = 512
