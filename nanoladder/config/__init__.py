"""The configuration: every knob in one frozen dataclass, and how the command line fills it.

    load_config(["config/x.py", "more.py", "--stage=amp", "--learning_rate=3e-4"])

Files are plain assignments, applied left to right; then the stages up to `--stage`; then `--key=value`.
"""

import ast
import dataclasses
import difflib
import math
import re
import sys
import textwrap
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from nanoladder import files
from nanoladder.config.expressions import LONGEST_TEXT, evaluate, short
from nanoladder.errors import BadInput

STAGES_DIR = Path(__file__).parents[2] / "config" / "stages"


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
    lr_scaling: Annotated[
        Literal["none", "linear", "sqrt"],
        "how learning_rate and min_lr, which suit lr_reference_batch, grow with batch_size; sqrt suits Adam",
    ] = "none"
    lr_reference_batch: Annotated[int, "sequences; of lr_scaling"] = 0
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


def load_config(argv):
    """Command line (without the program's name) -> Config. Raises BadInput; `--help` prints every key and exits."""
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    paths, given = parse_arguments(argv)
    values = dict(DEFAULTS)
    for path in paths:
        read_assignments(Path(path), values, given)
    if stage := given.get("stage", values["stage"]):
        for file in stage_files(stage):
            read_assignments(file, values, given)
    config = Config(**{**values, **given})
    check(config)
    return config


def parse_arguments(argv):
    """Splits ["x.py", "--key=value", "--key", "value"] into the files' paths and {key: typed value}."""
    paths, given = [], {}
    rest = iter(argv)
    for word in rest:
        if not word.startswith("--"):
            paths.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        known(key, "command line")
        if not equals and (text := next(rest, "--")).startswith("--"):
            raise BadInput(f"--{key}: no value given; expected {expected(key)}, such as --{key}={DEFAULTS[key]}")
        given[key] = typed(key, from_text(key, text), "command line")
    return paths, given


def read_assignments(path, values, given):
    """Applies a file of `key = expression` lines to values; expressions may use the keys set before.

    A command-line value (given) wins within expressions too.
    """
    try:
        source = files.read(path).decode()
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BadInput(f"{path} line {error.lineno or 1}: {error.msg}; expected lines like n_layer = 12") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "nested too deeply"
        name = short(str(path))
        raise BadInput(f"config file {name} cannot be read ({reason}); expected one such as config/gpt2.py") from None
    for statement in tree.body:
        where = f"{path} line {statement.lineno}"
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                continue
            case ast.Assign(targets=[ast.Name(id=key)], value=expression):
                known(key, where)
            case _:
                raise BadInput(f"{where}: only plain assignments are allowed; expected a line like n_layer = 12")
        try:
            value = evaluate(expression, ChainMap(given, values))
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            text = short(ast.get_source_segment(source, expression))
            raise BadInput(f"{where}: `{text}`: {error}; expected a value or arithmetic on keys") from None
        values[key] = typed(key, value, where)


def stage_names():
    """The ladder's stages in order: config/stages/NN_name.py -> name."""
    return [path.stem.partition("_")[2] for path in sorted(STAGES_DIR.glob("[0-9][0-9]_*.py"))]


def stage_files(name):
    """The files of the stages from the first up to `name`."""
    names = stage_names()
    if name not in names:
        raise BadInput(f"stage={name}: no such stage{nearest(name, names)}; `python ladder.py` lists them")
    return sorted(STAGES_DIR.glob("[0-9][0-9]_*.py"))[: names.index(name) + 1]


def known(key, where):
    if key not in DEFAULTS:
        raise BadInput(f"{where}: unknown key {short(repr(key))}{nearest(key, DEFAULTS)}; --help lists every key")


def nearest(name, names):
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def from_text(key, text):
    """A command line's text as the key's type where it reads as one, else the text itself."""
    kind = TYPES[key]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def typed(key, value, where):
    """The value, an int turned into a float where one is expected; BadInput if the type is wrong."""
    kind = TYPES[key]
    if value in WORDS.get(key, ()):  # in the place of a number
        return value
    if kind is float and type(value) is int and abs(value) < 2**1023:
        value = float(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            text = short(str(value))
            raise BadInput(f"{where}: {key}={text}: expected {expected(key)}{nearest(text, get_args(kind))}")
    elif type(value) is not kind or (kind is float and not math.isfinite(value)) or (key in PLACES and not value):
        raise BadInput(f"{where}: {key}={short(repr(value))}: expected {expected(key)}, such as {key}={DEFAULTS[key]}")
    elif kind is str and not (value.isprintable() and len(value) <= LONGEST_TEXT):
        raise BadInput(f"{where}: {key}={short(repr(value))}: expected at most {LONGEST_TEXT} printable characters")
    return value


def expected(key):
    kind = TYPES[key]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    text = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}[kind]
    return " or ".join([text, *WORDS.get(key, ())])


def check(config):
    """Raises BadInput for values that cannot work together, before anything is loaded or written."""

    def require(condition, message):
        if not condition:
            raise BadInput(message)

    if config.micro_batch_size == "auto":
        config = dataclasses.replace(config, micro_batch_size=1)  # the smallest that it may become
    at_least_1 = "n_layer n_head n_embd context_length batch_size pad_vocab_to keep_checkpoints"
    at_least_0 = (
        "vocab_size max_steps learning_rate min_lr warmup_steps lr_decay_steps weight_decay grad_clip seed "
        "log_interval eval_interval eval_windows save_interval save_every_minutes replay_step num_workers loss_chunks "
        "micro_batch_size lr_reference_batch batch_warmup_steps memory_gb"
    )
    for key, value in dataclasses.asdict(config).items():
        within = type(value) is not int or abs(value) < 2**63
        require(within, f"{key}={short(str(value))}: expected a number of at most 64 bits, less than 2**63")
    for key in at_least_1.split():
        require(getattr(config, key) >= 1, f"{key}={getattr(config, key)}: expected at least 1")
    for key in at_least_0.split():
        require(getattr(config, key) >= 0, f"{key}={getattr(config, key)}: expected 0 or more")
    for key in ("dropout", "beta1", "beta2"):
        require(0 <= getattr(config, key) < 1, f"{key}={getattr(config, key)}: expected 0 up to, not including, 1")
    c = config
    require(
        c.n_embd % c.n_head == 0,
        f"n_embd={c.n_embd} does not divide into n_head={c.n_head} heads of equal width; "
        f"expected a multiple of n_head, such as n_embd={max(1, round(c.n_embd / c.n_head)) * c.n_head}",
    )
    if c.micro_batch_size and c.batch_size % c.micro_batch_size:
        sizes = range(max(1, c.micro_batch_size - 9999), min(c.micro_batch_size + 9999, c.batch_size) + 1)
        divisors = [size for size in sizes if c.batch_size % size == 0] or [math.gcd(c.batch_size, c.micro_batch_size)]
        less, more = c.batch_size // c.micro_batch_size * c.micro_batch_size, c.micro_batch_size
        near = sorted(divisors, key=lambda size: abs(size - c.micro_batch_size))[:2]
        raise BadInput(
            f"batch_size={c.batch_size} does not divide into micro-batches of micro_batch_size={c.micro_batch_size}; "
            f"expected micro_batch_size {' or '.join(map(str, sorted(near)))}, "
            f"or batch_size {' or '.join(str(size) for size in (less, less + more) if size)}"
        )
    require(
        not (c.compile and (c.compile_scope == "block" or c.shard != "none") and c.checkpointing == "selective"),
        "checkpointing=selective chooses among the operators of a block, which compile_scope=block hides from it, "
        "as sharding does; expected compile_scope=model and shard=none, or checkpointing=every:1",
    )
    graphs = c.compile and c.compile_mode in ("reduce-overhead", "max-autotune")
    accumulates = 0 < c.micro_batch_size < c.batch_size or not c.set_to_none
    recomputes = c.compile_scope == "block" and c.checkpointing != "none"
    require(
        not (graphs and (accumulates or recomputes or c.shard != "none")),
        f"compile_mode={c.compile_mode} replays CUDA graphs, whose memory each forward writes again: gradients that "
        "add up and blocks that are recomputed would be overwritten, and sharded weights move; expected "
        "--compile_mode=default, or --micro_batch_size=0 --set_to_none=True --compile_scope=model --shard=none",
    )
    require(
        not (c.optimizer_in_backward and (0 < c.micro_batch_size < c.batch_size or c.grad_clip)),
        "optimizer_in_backward uses each gradient as it arrives, before there is a sum over micro-batches or a global "
        "norm to clip by; expected --micro_batch_size=0 --grad_clip=0, or --optimizer_in_backward=False",
    )
    require(
        not (c.optimizer_in_backward and c.dtype == "float16"),
        "optimizer_in_backward updates before it is known whether a float16 gradient overflows somewhere; "
        "expected --dtype=bfloat16, or --optimizer_in_backward=False",
    )
    require(
        not (c.optimizer in ("adafactor", "galore") and c.shard != "none"),
        f"optimizer={c.optimizer} works on whole matrices, of which shard={c.shard} leaves each process a part; "
        "expected --shard=none, or --optimizer=adamw8bit",
    )
    require(
        re.fullmatch(r"none|sqrt|selective|every:[1-9][0-9]*", c.checkpointing),
        f"checkpointing={c.checkpointing}: expected none, sqrt, selective or every:K, such as every:1 for every block",
    )
    require(
        c.micro_batch_size or not c.batch_warmup_steps,
        f"batch_warmup_steps={c.batch_warmup_steps}: a batch grows by micro-batches, so that shapes stay; expected "
        f"micro_batch_size, such as --micro_batch_size=1, or --batch_warmup_steps=0",
    )
    require(
        c.lr_scaling == "none" or c.lr_reference_batch,
        f"lr_scaling={c.lr_scaling} has no batch to scale from; expected lr_reference_batch, the batch_size that "
        f"learning_rate={c.learning_rate} suits, such as --lr_reference_batch=32",
    )
    require(
        c.min_lr <= c.learning_rate,
        f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}; expected at most that, such as a tenth of it",
    )


def differences(config):
    """{key: value} of what differs from the defaults."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value != DEFAULTS[key]}


def help_text():
    lines = [
        "usage: python train.py config/x.py [more.py ...] [--stage=NAME] [--key=value | --key value ...]",
        "",
        "keys, with their defaults:",
    ]
    for key, default in DEFAULTS.items():
        choices = f" ({' | '.join(get_args(TYPES[key]))})" if get_origin(TYPES[key]) is Literal else ""
        text = textwrap.wrap(MEANINGS[key] + choices, 64)
        lines.append(f"  {f'{key}={default}':<32}  {text[0]}")
        lines += [" " * 36 + line for line in text[1:]]
    return "\n".join(lines)
