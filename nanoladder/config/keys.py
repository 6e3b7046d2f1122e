"""The keys: every knob in one frozen dataclass, with its type, default and meaning."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Config:
    """Every knob with its default, the finished loop. An interval of 0 means never."""

    # -- the run
    out_dir: Annotated[str, "folder for config.json, metrics.jsonl, loss.png and the checkpoints"] = "out"
    dataset: Annotated[str, "prepared data: a folder's name in data/, or its path"] = "python_stdlib"
    init_from: Annotated[str, "scratch | resume | auto (resume if it can) | a checkpoint's path"] = "scratch"
    overwrite: Annotated[bool, "let a run from scratch replace the one in out_dir"] = False
    seed: Annotated[int, "of the weights, the batches and the dropout"] = 1337
    device: Annotated[str, "auto | cpu | cuda | cuda:N"] = "auto"
    memory_gb: Annotated[float, "1e9 bytes that a step may take in each process; 0: what is free on the device"] = 0.0
    stage: Annotated[str, "climb the ladder up to this stage only (python ladder.py lists them)"] = ""
    deterministic: Annotated[bool, "only algorithms that repeat bit for bit; slower"] = False

    # -- the model
    n_layer: Annotated[int, "transformer blocks"] = 12
    n_head: Annotated[int, "attention heads"] = 12
    n_embd: Annotated[int, "width of the residual stream"] = 768
    context_length: Annotated[int, "tokens in a window"] = 1024
    vocab_size: Annotated[int, "token ids; 0: what the dataset says"] = 0
    dropout: Annotated[float, "probability, in embeddings, attention and residuals"] = 0.0
    bias: Annotated[bool, "biases in linear layers and norms, as GPT-2 has"] = False

    # -- the optimization
    batch_size: Annotated[int, "sequences per optimizer step, over all processes"] = 32
    batch_warmup_steps: Annotated[int, "steps in which the batch grows to batch_size, by whole micro-batches"] = 0
    max_steps: Annotated[int, "optimizer steps of the whole run"] = 10_000
    learning_rate: Annotated[float, "after warm-up"] = 6e-4
    min_lr: Annotated[float, "at the end of the cosine"] = 6e-5
    warmup_steps: Annotated[int, "linear warm-up"] = 200
    lr_decay_steps: Annotated[int, "step at which the cosine reaches min_lr; 0: max_steps"] = 0
    weight_decay: Annotated[float, "on multiplied matrices only, not on norms, biases or positions"] = 0.1
    beta1: Annotated[float, "AdamW's decay of the mean gradient"] = 0.9
    beta2: Annotated[float, "AdamW's decay of the mean squared gradient"] = 0.95
    grad_clip: Annotated[float, "largest global gradient norm; 0: no clipping"] = 1.0

    # -- the ladder: every default is the finished loop's; config/stages/00_naive.py turns all of it off
    set_to_none: Annotated[bool, "drop gradients between steps instead of zeroing them"] = True
    lazy_metrics: Annotated[bool, "read the loss when it is logged, not every step"] = True
    num_workers: Annotated[int, "processes that cut batches ahead of use; 0: in the loop"] = 2
    keep_memory: Annotated[bool, "keep freed memory in the process (glibc; CUDA: expandable segments)"] = True
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"], "of float32 products: float32, TF32 or bfloat16 inside"
    ] = "high"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], "of products; auto: bfloat16 where it is native"
    ] = "auto"
    attention: Annotated[
        Literal["matmul", "sdpa", "flash", "cudnn", "efficient"],
        "matmul: as in the paper; sdpa: fused, the kernel PyTorch prefers; or that kernel",
    ] = "sdpa"
    adamw_impl: Annotated[
        Literal["forloop", "foreach", "fused"], "AdamW's update: a loop, a kernel an operation, or one kernel"
    ] = "fused"
    pad_vocab_to: Annotated[int, "make the rows of embedding and head a multiple of this"] = 64
    compile: Annotated[bool, "compile the model with torch.compile"] = True
    compile_scope: Annotated[Literal["model", "block"], "what is compiled as one; block starts sooner"] = "model"
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        "of torch.compile; reduce-overhead and max-autotune replay CUDA graphs",
    ] = "default"
    loss_chunks: Annotated[int, "run head and loss in this many chunks of the tokens; 0: whole"] = 8
    checkpointing: Annotated[str, "recompute activations: none | every:K (each K-th block) | sqrt | selective"] = "none"
    micro_batch_size: Annotated[
        int | Literal["auto"],
        "sequences in a forward of one process; 0: all at once; auto: the most that fits, found anew at each start",
    ] = 0
    optimizer: Annotated[
        Literal["adamw", "sgd", "adafactor", "muon", "lion", "adamw8bit", "galore"],
        "whose update; learning_rate is AdamW's, the others take the multiple of it that suits them",
    ] = "adamw"
    optimizer_in_backward: Annotated[
        bool, "update as each gradient arrives and free it; compiled as one model, all arrive together"
    ] = False

    ddp: Annotated[bool, "share each batch among the processes that torchrun started, one a device"] = True
    shard: Annotated[
        Literal["none", "optimizer", "full"],
        "what each process holds only its share of: nothing; optimizer state and gradients; the weights too",
    ] = "none"

    # -- what is watched and kept
    log_interval: Annotated[int, "steps between logged rows"] = 10
    eval_interval: Annotated[int, "steps between evaluations"] = 250
    eval_windows: Annotated[int, "validation windows, evenly spaced and always the same; 0: all"] = 256
    save_interval: Annotated[int, "steps between checkpoints (the end is always saved); 0: never, not even then"] = 250
    save_every_minutes: Annotated[float, "minutes between further checkpoints; 0: never"] = 0.0
    replay_step: Annotated[int, "train up to this step again, saving nothing, and look into it; 0: no"] = 0
    keep_checkpoints: Annotated[int, "most recent checkpoints kept, besides best.pt"] = 2
    wandb: Annotated[Literal["off", "offline", "online"], "track with wandb"] = "off"
    wandb_project: Annotated[str, "wandb's name for the family of runs"] = "nanoladder"


PLACES = ("out_dir", "dataset", "init_from", "device")  # text that cannot be empty
DEFAULTS = dataclasses.asdict(Config())
HINTS = {key: get_args(hint)[0] for key, hint in get_type_hints(Config, include_extras=True).items()}
TYPES = {key: get_args(hint)[0] if get_origin(hint) is Union else hint for key, hint in HINTS.items()}
WORDS = {key: get_args(get_args(hint)[1]) for key, hint in HINTS.items() if get_origin(hint) is Union}
MEANINGS = {key: get_args(hint)[1] for key, hint in get_type_hints(Config, include_extras=True).items()}


def differences(config):
    """{key: value} of what differs from the defaults."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value != DEFAULTS[key]}
