"""A beginner's loop: correct, plain, and not slowed down on purpose.

Everything runs in float32 and eagerly. Attention is the formula of the paper, AdamW a loop over the parameters.
Gradients are zeroed between steps, the loss is read at every step, and each batch is cut when it is needed.

Tried: we wrote GELU's tanh as a sigmoid, which compiles to faster code. But run eagerly it keeps four tensors, so
PyTorch's own GELU stayed.
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
