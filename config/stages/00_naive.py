"""A beginner's loop: correct, plain, and not slowed down on purpose.

Everything runs in float32 and eagerly. Attention is the formula of the paper, AdamW a loop over the parameters.
Gradients are zeroed between steps, the loss is read at every step, and each batch is cut when it is needed.

Attention is the only layer in which tokens meet, and later stages change how it is computed, never what. A matrix
product makes three vectors of each token: a query, a key and a value, each cut into nh heads of hs numbers. For each
sequence and head, q, k and v are then (T, hs), a row for each token:

    scores = q @ k.T / √hs         (T, T): how well the query of row i matches the key of column j
    scores[i, j] = -∞ if j > i     causal: no token sees a later one
    weights = softmax(scores)      in each row positive numbers that sum to 1
    y = weights @ v                (T, hs): for each token a mean of the values, by these weights

The heads' means stand side by side again and pass through one more matrix. The factor 1 / √hs keeps the scores of
random vectors near 1, whatever hs is; without it the softmax would begin with nearly all weight on one token. Scores,
masked scores and weights are B · nh · T² numbers each, T / hs times as many as queries, and the backward needs them:
at a context of 1,024 they are by far the largest tensors of a block. flash and blocks do without storing them all.

Tried: we wrote GELU's tanh as a sigmoid, which compiles to faster code. But run eagerly it keeps four tensors, so
PyTorch's own GELU stayed.
Try: `python train.py config/recipe_small.py --stage=naive --max_steps=20 --eval_windows=16 --out_dir=out/naive` prints
the loss and the milliseconds of a step; the same with `--stage=compile`, in another folder, takes fewer, for the same
losses.
Source:
- Vaswani et al. 2017, "Attention Is All You Need": https://arxiv.org/abs/1706.03762
- Radford et al. 2019, for the model:
  https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

set_to_none = False
lazy_metrics = False
num_workers = 0
keep_memory = False
matmul_precision = "highest"
dtype = "float32"
attention = "matmul"
adamw_impl = "forloop"
pad_vocab_to = 1
compile = False
loss_chunks = 0
cuda_graph = False
activation_checkpointing = "none"
micro_batch_size = 0
optimizer = "adamw"
optimizer_in_backward = False
float8 = False
ddp = False
shard = "none"
tensor_parallel = 1
context_parallel = 1
pipeline_parallel = 1
half_residual = False
