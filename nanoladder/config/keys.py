"""The keys: every setting with its type, default and meaning, in one frozen dataclass."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Config:
    """Every key with its default, which is the finished loop's. An interval of 0 means never."""

    # -- run
    out_dir: Annotated[str, "folder for checkpoints, config.json, metrics.jsonl and loss.png"] = "out"
    dataset: Annotated[str, "prepared dataset: the name of a folder in data/, or a path"] = "python_stdlib"
    init_from: Annotated[str, "scratch | resume | auto (resume if there is a run) | PATH | hf:NAME"] = "scratch"
    seed: Annotated[int, "random seed of initial weights, batches and dropout"] = 1337
    device: Annotated[str, "auto (a GPU if there is one) | cpu | cuda | cuda:N | mps"] = "auto"
    memory_gb: Annotated[float, "memory budget of each process, in 1e9 bytes; 0: all that is free"] = 0.0
    stage: Annotated[str, "climb the ladder up to this stage only; `python ladder.py` lists them"] = ""
    recipe: Annotated[str, "climb the second ladder, config/recipe/, up to this rung"] = ""
    deterministic: Annotated[bool, "deterministic algorithms only: runs repeat bit for bit, slower"] = False

    # -- model
    n_layer: Annotated[int, "number of transformer blocks"] = 12
    n_head: Annotated[int, "number of attention heads in a block"] = 12
    n_embd: Annotated[int, "embedding dimension, the width of the residual stream"] = 768
    context_length: Annotated[int, "tokens in a sequence, at most (nanoGPT: block_size)"] = 1024
    vocab_size: Annotated[int, "number of token ids; 0: the dataset's"] = 0
    dropout: Annotated[float, "dropout probability in embeddings, attention and residual branches"] = 0.0
    bias: Annotated[bool, "use biases in Linear and LayerNorm, as GPT-2 does"] = False

    # -- optimization
    batch_size: Annotated[int, "sequences per optimizer step, over all micro-batches and processes"] = 32
    max_steps: Annotated[int, "optimizer steps of the whole run (nanoGPT: max_iters)"] = 10_000
    learning_rate: Annotated[float, "peak learning rate, after the warmup"] = 6e-4
    min_lr: Annotated[float, "final learning rate, after the cosine decay"] = 6e-5
    warmup_steps: Annotated[int, "steps of linear learning rate warmup (nanoGPT: warmup_iters)"] = 200
    lr_decay_steps: Annotated[int, "step at which the cosine decay reaches min_lr; 0: max_steps"] = 0
    weight_decay: Annotated[float, "weight decay of matrices; norms, biases and positions have none"] = 0.1
    beta2: Annotated[float, "AdamW's decay rate of the mean squared gradient; the mean's is 0.9"] = 0.95
    grad_clip: Annotated[float, "clip gradients to this global norm; 0: no clipping"] = 1.0

    # -- ladder: config/stages/00_naive.py turns all of it off
    set_to_none: Annotated[bool, "free gradients between steps instead of zeroing them"] = True
    lazy_metrics: Annotated[bool, "read the loss from the device when it is logged, not every step"] = True
    num_workers: Annotated[int, "DataLoader workers that prepare batches; 0: the training process does"] = 2
    keep_memory: Annotated[bool, "keep freed memory for reuse (CPU: glibc; CUDA: expandable segments)"] = True
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"], "precision inside float32 matmuls: float32, TF32 or bfloat16"
    ] = "high"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "autocast dtype; auto: bfloat16 if native, else float16 or float32",
    ] = "auto"
    attention: Annotated[
        Literal["auto", "matmul", "sdpa", "blocks", "flash", "cudnn", "efficient"],
        "matmul: the formula; sdpa: fused; auto: blocks on a CPU, else sdpa",
    ] = "auto"
    adamw_impl: Annotated[
        Literal["forloop", "foreach", "fused"], "AdamW: a loop over parameters, a kernel per operation, or one kernel"
    ] = "fused"
    pad_vocab_to: Annotated[int, "pad the vocabulary to a multiple of this; 1: no padding"] = 64
    compile: Annotated[bool, "compile the model with torch.compile"] = True
    compile_scope: Annotated[
        Literal["model", "block"], "compile the whole model, or one block for all (starts sooner)"
    ] = "model"
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        "torch.compile's; reduce-overhead and max-autotune use CUDA graphs",
    ] = "default"
    loss_chunks: Annotated[int | Literal["auto"], "chunks of tokens for the loss; 0: none; auto: by size"] = "auto"
    checkpointing: Annotated[str, "recompute activations: none | every:K blocks | sqrt | selective"] = "none"
    micro_batch_size: Annotated[int | Literal["auto"], "sequences per forward; 0: all; auto: what fits"] = 0
    optimizer: Annotated[
        Literal["adamw", "sgd", "adafactor", "muon", "lion", "adamw8bit", "galore"],
        "learning_rate suits adamw; the others scale it by their own factor",
    ] = "adamw"
    optimizer_in_backward: Annotated[bool, "update each parameter once its gradient is ready, then free it"] = False
    ddp: Annotated[bool, "split each batch among the processes that torchrun starts (DDP)"] = True
    shard: Annotated[
        Literal["none", "optimizer", "full"], "FSDP2: shard optimizer state and gradients, or the weights too (full)"
    ] = "none"
    shard_within: Annotated[
        int | Literal["node"], "processes that share one copy of the shards; 0: all; node: a node's"
    ] = 0
    tensor_parallel: Annotated[int, "processes that share every matrix, by heads and columns"] = 1
    context_parallel: Annotated[int, "processes that share each sequence"] = 1
    pipeline_parallel: Annotated[int, "processes that share the blocks, in stages"] = 1
    pipeline_schedule: Annotated[Literal["1f1b", "interleaved"], "order of the forwards and backwards"] = "1f1b"

    # -- recipe: config/recipe/00_base.py has GPT-2's
    position: Annotated[Literal["learned", "rotary"], "position embedding, or rotation of queries and keys"] = "learned"
    qk_norm: Annotated[bool, "RMS norm of each head's queries and keys"] = False
    activation: Annotated[Literal["gelu", "relu2"], "of the MLP; relu2: the square of ReLU"] = "gelu"
    zero_init: Annotated[bool, "begin with zeros in the projections into the residual stream"] = False
    norm: Annotated[Literal["layer", "rms"], "LayerNorm, or RMSNorm"] = "layer"
    schedule: Annotated[
        Literal["cosine", "trapezoid"], "learning rate after the warmup; trapezoid: constant, then linear"
    ] = "cosine"
    tied: Annotated[bool, "the output head's weight is the token embedding's"] = True
    embedding_lr: Annotated[float, "learning rate of token and value embeddings, as a multiple"] = 1.0
    head_lr: Annotated[float, "learning rate of an untied head, as a multiple"] = 1.0
    logit_softcap: Annotated[float, "limit of the logits, by a tanh; 0: none"] = 0.0
    embedding_skip: Annotated[bool, "mix the token embedding into the input of each block"] = False
    value_embedding: Annotated[bool, "token embeddings in the values of every second block"] = False
    decay: Annotated[
        Literal["decoupled", "cautious"], "weight decay; cautious: only of weights that the update shrinks too"
    ] = "decoupled"
    average: Annotated[Literal["none", "ema"], "weights to evaluate: the last, or an average"] = "none"

    # -- logging and checkpoints
    log_interval: Annotated[int, "steps between rows of metrics.jsonl"] = 10
    eval_interval: Annotated[int, "steps between evaluations of the validation loss"] = 250
    eval_windows: Annotated[int, "validation sequences per evaluation, always the same ones; 0: all"] = 256
    sample_interval: Annotated[int, "steps between lines of text that the model writes; 0: none"] = 0
    save_interval: Annotated[int, "steps between checkpoints, and one at the end; 0: no checkpoints"] = 250
    keep_checkpoints: Annotated[int, "number of recent checkpoints to keep, besides the best"] = 2
    track: Annotated[Literal["off", "wandb"], "dashboard to feed"] = "off"

    @property
    def padded_vocab_size(self):
        """Rows of the token embedding, and logits of a token."""
        return self.vocab_size + -self.vocab_size % self.pad_vocab_to

    @property
    def compiles_blocks(self):
        """True if the blocks are compiled one by one: between them, weights or activations are exchanged."""
        is_cut = self.shard != "none" or self.tensor_parallel > 1 or self.pipeline_parallel > 1
        return self.compile and (self.compile_scope == "block" or is_cut)


HEADINGS = {  # of --help, by the first key under each
    "out_dir": "run",
    "n_layer": "model",
    "batch_size": "optimization",
    "set_to_none": "ladder (`python ladder.py` explains its stages)",
    "position": "recipe (what a step is worth: the rungs of config/recipe/)",
    "log_interval": "logging and checkpoints (intervals in steps; 0: never)",
}
INSTEAD = {  # names of nanoGPT's and others that are no keys here: what to write instead
    "max_iters": "max_steps",
    "block_size": "context_length",
    "gradient_accumulation_steps": "batch_size, of a whole step (480), and micro_batch_size, of one forward (12)",
    "eval_iters": "eval_windows, which counts sequences",
    "eval_only": "`python evaluate.py`",
    "always_save_checkpoint": "save_interval",
    "decay_lr": "warmup_steps=0 and min_lr equal to learning_rate, for a constant rate",
    "warmup_iters": "warmup_steps",
    "lr_decay_iters": "lr_decay_steps",
    "beta1": "beta2 alone; beta1 is 0.9",
    "backend": "no such key: nccl is chosen on GPUs, gloo on CPUs",
    "wandb_log": "track=wandb",
    "wandb_project": "WANDB_PROJECT in the environment",
    "wandb_run_name": "out_dir, whose name the run has",
}
DEFAULTS = dataclasses.asdict(Config())
ANNOTATIONS = {key: get_args(hint) for key, hint in get_type_hints(Config, include_extras=True).items()}
MEANINGS = {key: meaning for key, (_, meaning) in ANNOTATIONS.items()}
# A key's type is bool, int, float, str or a Literal of its choices. A number may have words that take its place:
# int | Literal["auto"] is the type int and the word "auto".
TYPES = {key: get_args(hint)[0] if get_origin(hint) is Union else hint for key, (hint, _) in ANNOTATIONS.items()}
WORDS = {key: get_args(get_args(hint)[1]) for key, (hint, _) in ANNOTATIONS.items() if get_origin(hint) is Union}


def differences(config):
    """{key: value} of the values that differ from the defaults."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value != DEFAULTS[key]}
