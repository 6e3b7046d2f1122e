"""Two processes share every sequence: each has half of its tokens.

Stands on: ddp
What: every process has all weights and a part of each sequence; gradients are averaged over all, as ddp does. Around
attention, the only layer in which tokens meet, they exchange: each gets whole sequences of a part of the heads, or, if
the heads do not divide among them, all keys and values.
Why: activations grow with the length of a sequence, and a long one may not fit one device even by itself.
Cost: nothing hides what a block exchanges, and checkpointing exchanges it again. With B sequences of T tokens, C
channels and n processes, each sends for heads 8·B·T·C·(n - 1) / n² numbers a step, in two all-to-alls in the forward
and two in the backward; for keys and values n / 2 times as many, in an all-gather and a reduce-scatter, and it keeps
the keys and values of all tokens: 2 of the 16 numbers that a block keeps for a token and a channel.
Tried: at first we let the queries keep alive the projection that they are a view of, and with it the keys and values,
so memory fell less than it should.
Try: `torchrun --standalone --nproc_per_node=2 train.py config/recipe_small.py --compile=False --max_steps=20
--eval_windows=16 --context_parallel=2 --out_dir=out/context`: the losses of one process.
Source:
- Jacobs et al. 2023, "DeepSpeed Ulysses", exchanges heads: https://arxiv.org/abs/2309.14509
- Llama team 2024, "The Llama 3 Herd of Models", section 3.3.2, gathers keys and values:
  https://arxiv.org/abs/2407.21783
"""

context_parallel = 2
