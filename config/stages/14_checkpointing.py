"""A block's activations are dropped, and recomputed in the backward.

Stands on: cuda_graph
What: `torch.utils.checkpoint`. every:K recomputes every K-th block (every:1 all of them), sqrt recomputes segments
of √n blocks, and selective everything but the outputs of matrix products and attention.
Why: a block keeps about 34 bytes per activation in half precision, its input only 2. Compute is traded for memory.
Cost: one more forward, about a third of a step, for every:1 and sqrt; selective repeats only what is cheap.
Tried: we combined selective with blocks that are compiled one by one, and it kept nothing: a compiled block hides the
operators that it looks for, so the combination is refused.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=H100 --vocab_size=50257 --batch_size=32 --micro_batch_size=0
--stages=cuda_graph,checkpointing`: a third of the memory, for a step that takes a fifth longer at the limit.
Source:
- Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": https://arxiv.org/abs/1604.06174
- Korthikanti et al. 2022, on selective: https://arxiv.org/abs/2205.05198
- torch.utils.checkpoint: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

activation_checkpointing = "every:1"
