"""The keys: every setting with its type, default and meaning, in one frozen dataclass."""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Config:
    """Every key with its default, which is the finished loop's. An interval of 0 means never."""

    # -- run
    out_dir: str = "out"  # folder for checkpoints, config.json, metrics.jsonl and loss.png
    dataset: str = "python_stdlib"  # prepared dataset: the name of a folder in data/, or a path
    init_from: str = "scratch"  # scratch | resume | auto (resume if there is a run) | PATH | hf:NAME
    new_data: bool = False  # resume although the dataset of this name has changed since
    seed: int = 1337  # random seed of initial weights, batches and dropout
    device: str = "auto"  # auto (a GPU if there is one) | cpu | cuda | cuda:N | mps
    deterministic: bool = False  # deterministic algorithms only: runs repeat bit for bit, slower
    collective_timeout: int = 600  # seconds to wait for another process, from step 2 on; 0: an hour

    # -- model
    n_layer: int = 12  # number of transformer blocks
    n_head: int = 12  # number of attention heads in a block
    n_embd: int = 768  # embedding dimension, the width of the residual stream
    context_length: int = 1024  # tokens in a sequence, at most (nanoGPT: block_size)
    vocab_size: int = 0  # number of token ids; 0: the dataset's
    dropout: float = 0.0  # dropout probability in embeddings, attention and residual branches
    bias: bool = False  # use biases in Linear and LayerNorm, as GPT-2 does

    # -- optimization
    batch_size: int = 32  # sequences per optimizer step, over all micro-batches and processes
    max_steps: int = 10_000  # optimizer steps of the whole run (nanoGPT: max_iters)
    learning_rate: float = 6e-4  # peak learning rate, after the warmup
    min_lr: float = 6e-5  # final learning rate, after the cosine decay
    warmup_steps: int = 200  # steps of linear learning rate warmup (nanoGPT: warmup_iters)
    lr_decay_steps: int = 0  # step at which the cosine decay reaches min_lr; 0: max_steps
    weight_decay: float = 0.1  # weight decay of matrices; norms, biases and positions have none
    beta1: float = 0.9  # AdamW's decay rate of the mean gradient
    beta2: float = 0.95  # AdamW's decay rate of the mean squared gradient
    grad_clip: float = 1.0  # clip gradients to this global norm; 0: no clipping

    # -- ladder (`python ladder.py` explains its stages)
    set_to_none: bool = True  # free gradients between steps instead of zeroing them
    lazy_metrics: bool = True  # read the loss from the device when it is logged, not every step
    num_workers: int | Literal["auto"] = "auto"  # DataLoader workers; 0: none; auto: two on a GPU, else none
    keep_memory: bool = True  # keep freed memory for reuse (CPU: glibc; CUDA: expandable segments)
    # precision inside float32 matmuls: float32, TF32 or bfloat16
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    # autocast dtype; auto: bfloat16 if native, else float16 or float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    half_residual: bool = False  # keep the residual stream in autocast's dtype, instead of float32
    # matmul: the formula; sdpa: fused; auto: blocks on a CPU, else sdpa
    attention: Literal["auto", "matmul", "sdpa", "blocks", "flash", "cudnn"] = "auto"
    adamw_impl: Literal["forloop", "fused"] = "fused"  # AdamW: a loop over parameters, or one kernel
    pad_vocab_to: int = 64  # pad the vocabulary to a multiple of this; 1: no padding
    compile: bool = True  # compile the model with torch.compile
    loss_chunks: int | Literal["auto"] = "auto"  # chunks of tokens for the loss; 0: none; auto: by size
    cuda_graph: bool = True  # on a GPU, capture the kernels of a step, and launch them by one call
    float8: bool = False  # multiply matrices in float8, on GPUs from Hopper on (H100)
    activation_checkpointing: str = "none"  # recompute activations: none | every:K | sqrt | selective
    micro_batch_size: int | Literal["auto"] = 0  # sequences per forward; 0: all; auto: as many as fit
    # optimizer; sgd, adafactor and lion take a multiple of learning_rate
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "lion", "adamw8bit", "galore"] = "adamw"
    optimizer_in_backward: bool = False  # update each parameter as soon as its gradient is ready
    ddp: bool = True  # split each batch among the processes that torchrun starts (DDP)
    # what FSDP2 shards; full: weights too; hybrid: full within each node
    shard: Literal["none", "optimizer", "full", "hybrid"] = "none"
    tensor_parallel: int = 1  # processes that share every matrix, by heads and columns
    context_parallel: int = 1  # processes that share each sequence
    pipeline_parallel: int = 1  # processes that share the blocks, in stages
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"  # order of the forwards and backwards

    # -- recipe (token efficiency: the rungs of config/recipe/)
    position: Literal["learned", "rotary"] = "learned"  # learned position embeddings, or rotary ones (RoPE)
    qk_norm: bool = False  # normalize each head's queries and keys (RMS)
    key_offset: bool = False  # at each position, use the key of the previous token
    exclusive_attention: bool = False  # attention returns nothing of a position's own value
    activation: Literal["gelu", "relu2"] = "gelu"  # activation of the MLP; relu2: ReLU squared
    zero_init: bool = False  # initialize residual projections and an untied head to zero
    # decay of the learning rate; trapezoid: constant, then linear
    schedule: Literal["cosine", "trapezoid"] = "cosine"
    tie_embeddings: bool = True  # the output head's weight is the token embedding's
    embedding_lr: float = 1.0  # token and value embeddings: multiple of learning_rate
    head_lr: float = 1.0  # untied head: multiple of learning_rate
    scalar_lr: float = 1.0  # learned mixing weights: multiple of learning_rate
    sampled_softmax: int = 0  # train on the logits of a batch's targets and of this many other tokens; 0: of all
    x0_skip: bool = False  # mix the token embedding into the input of each block
    value_embedding: bool = False  # add token embeddings to the values of every second block
    embedding_norm: bool = False  # normalize each token's embedding (RMS)
    smear: bool = False  # add a learned fraction of the previous token's embedding
    polar_express: bool = False  # Muon takes four iterations, with the coefficients of Polar Express
    split_qkv: bool = False  # Muon orthogonalizes queries, keys and values separately

    # -- logging and checkpoints (intervals in steps; 0: never)
    log_interval: int = 10  # steps between rows of metrics.jsonl
    eval_interval: int = 250  # steps between evaluations of the validation loss
    eval_windows: int = 256  # validation sequences per evaluation, always the same ones; 0: all
    sample_interval: int = 0  # steps between samples of the model's text; 0: none
    save_interval: int = 250  # steps between checkpoints; one at the end, too; 0: none
    wandb: bool = False  # send the metrics to Weights & Biases

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding, and logits of a token."""
        return self.vocab_size + -self.vocab_size % self.pad_vocab_to

    @property
    def divides_weights(self) -> bool:
        """True if processes, where there are several, have the weights among them, so that none has all."""
        return self.shard != "none" or self.tensor_parallel > 1 or self.pipeline_parallel > 1

    @property
    def compiles_blocks(self) -> bool:
        """True if blocks are compiled one by one, because between them data is exchanged or weights are updated."""
        return self.compile and (self.divides_weights or self.optimizer_in_backward)

    @property
    def has_rates(self) -> bool:
        """True if embeddings, an untied head or learned mixing weights have learning rates of their own."""
        return not self.tie_embeddings or self.embedding_lr != 1 or self.scalar_lr != 1

    @property
    def scales_lr(self) -> bool:
        """True if parameter groups may scale the schedule's learning rate, by their lr_factor."""
        return self.has_rates or self.optimizer in ("sgd", "adafactor", "lion")


# Keys of rungs that gained nothing and are gone: {key: the value that a model without the rung has}
REMOVED = {"norm": "layer", "logit_softcap": 0.0, "cautious_decay": False, "ema": False}
INSTEAD = {  # {page: replacements of names that are not keys here: of another project, or of REMOVED}
    "docs/recipe.md": dict.fromkeys(REMOVED, "none: it gained nothing, and was removed after commit 4fb2a2d"),
    "docs/from-nanogpt.md": {
        "max_iters": "max_steps",
        "block_size": "context_length",
        "gradient_accumulation_steps": "batch_size, of a whole step (480), and micro_batch_size, of one forward (12)",
        "eval_iters": "eval_windows, which counts sequences",
        "eval_only": "`python evaluate.py`",
        "always_save_checkpoint": "save_interval",
        "decay_lr": "warmup_steps=0 and min_lr=learning_rate, for a constant rate",
        "warmup_iters": "warmup_steps",
        "lr_decay_iters": "lr_decay_steps",
        "backend": "none: nccl is chosen on GPUs, gloo on CPUs",
        "wandb_log": "wandb=True",
        "wandb_project": "WANDB_PROJECT in the environment",
        "wandb_run_name": "out_dir, which also names the run",
    },
    "docs/from-nanochat.md": {
        "depth": "n_layer, n_embd and n_head (depth 12: 12, 768 and 6)",
        "aspect_ratio": "n_embd",
        "head_dim": "n_head, which is n_embd / head_dim",
        "max_seq_len": "context_length",
        "device_batch_size": "micro_batch_size",
        "total_batch_size": "batch_size, which counts sequences, not tokens",
        "num_iterations": "max_steps",
        "matrix_lr": "learning_rate",
        "unembedding_lr": "head_lr, a multiple of learning_rate",
        "warmdown_ratio": "schedule=trapezoid, which decays over the last half",
        "final_lr_frac": "min_lr",
        "eval_every": "eval_interval",
        "eval_tokens": "eval_windows, which counts sequences",
        "core_metric_every": "`python evaluate.py --tasks FILES`",
        "sample_every": "sample_interval",
        "save_every": "save_interval",
        "resume_from_step": "init_from=resume",
        "model_tag": "out_dir",
        "device_type": "device",
        "fp8": "float8",
    },
}
OPTIONS = {  # replacements of options that are not keys
    "resume": "--init_from=resume, which continues the run in --out_dir",
    "config": "the path of a config file alone: python train.py config/quickstart.py",
    "stage": "--stage=NAME on the command line",
    "recipe": "--recipe=NAME on the command line",
}
PATHS = ("out_dir", "dataset", "init_from")  # keys that may hold a path
DEFAULTS = dataclasses.asdict(Config())
# A key's comment, beside it or above it, is its meaning in --help; a comment that begins with -- is a heading there.
ENTRY = r"^    (?:# -- (.+)\n    )?(?:# (.+)\n    )?(\w+): .+? = .+?(?:  # (.+))?$"
ENTRIES = re.findall(ENTRY, inspect.getsource(Config), re.MULTILINE)
HEADINGS = {key: heading for heading, _, key, _ in ENTRIES if heading}
MEANINGS = {key: above or beside for _, above, key, beside in ENTRIES}
# A key's type is bool, int, float, str or a Literal of its choices. A number may also be given as a word:
# int | Literal["auto"] is the type int, or the word "auto".
HINTS = get_type_hints(Config)
TYPES = {key: get_args(hint)[0] if get_origin(hint) is Union else hint for key, hint in HINTS.items()}
WORDS = {key: get_args(get_args(hint)[1]) for key, hint in HINTS.items() if get_origin(hint) is Union}


def differences(config: Config) -> dict:
    """{key: value} of the values that differ from the defaults."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value != DEFAULTS[key]}
