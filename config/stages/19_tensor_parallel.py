"""Two processes share every matrix: each does half of a layer's work.

Stands on: ddp
What: the first matrix of attention and of the MLP is cut by columns (attention's by heads), the second by rows; the
vocabulary is cut by token ids. Between them, where norms, dropout and residuals act on each token alone, every process
has a part of the sequence.
Why: weights, their gradients, the optimizer's state and the activations of a layer are divided, and so is the time that
one sequence takes. It is the way to train a layer that does not fit one device, or a batch of few sequences.
Cost: each block exchanges activations eight times a step: two all-gathers and two reduce-scatters in the forward and as
many in the backward. Nothing hides them, so they need the fast links within a node. Every process keeps the gathered
inputs of qkv and fc for the backward.
Tried: on the two cores of an EPYC we got 1.2 times the speed of one process, where context_parallel got 1.5: without
fast links, use it only for models that do not fit.
Try: `torchrun --standalone --nproc_per_node=2 train.py config/recipe_small.py --compile=False --max_steps=20
--eval_windows=16 --tensor_parallel=2 --out_dir=out/tensor`: the losses of one process; the header says what each holds.
Source:
- Shoeybi et al. 2019, "Megatron-LM": https://arxiv.org/abs/1909.08053
- Korthikanti et al. 2022, on the sequence: https://arxiv.org/abs/2205.05198
- torch.distributed.tensor.parallel: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

tensor_parallel = 2
