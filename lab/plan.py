"""The command line of profile.py, and the rows that each mode measures."""

import argparse
import ast
import contextlib
import dataclasses
import math
import os
import textwrap
from collections.abc import Callable
from typing import NamedTuple, get_args
from nanoladder.entry import Parser

from lab import tables
from lab.devices import DATASHEETS
from lab.summary import row_below
from nanoladder.config import TYPES, stage_files, stage_names
from nanoladder.config.stages import fields, fields_up_to, needs_several, stage_below
from nanoladder.errors import BadInput, nearest
from nanoladder.kernels import count_chunks, uses_blocks
from nanoladder.machine import choose_device, choose_dtype
from nanoladder.parallel import CUTS
from nanoladder.run import load_config
from nanoladder.run.memory import divisors

MODES = {
    "ladder": "each stage on top of those that it stands on (the default)",
    "each": "naive with one stage added, for every stage, and with every optimizer",
    "without": "the config as it is, with one stage removed",
    "attention": "the config as it is, with every kernel of attention",
    "losses": "head and loss by themselves: the operator beside PyTorch's functions and Liger's kernel",
    "optimizers": "whole training runs with every optimizer, each at several learning rates",
    "sweep": "the same batch, cut into micro-batches of every size",
    "scaling": "1, 2, 4, ... processes of this machine along a --dimension: efficiency, bytes sent, time, memory",
    "judge": "the working tree beside another version: a gain, or noise? Exit code 0: better, or no change that can be "
    "seen; 1: worse or wrong; 2: bad input",
    "tune": "a search for the fastest config of this machine: writes config/tuned/<machine>/<config>.py",
    "peers": "the naive and the finished loop beside Hugging Face's Trainer, Lightning and nanoGPT: time, memory, loss",
    "predict": "what the run will cost: the memory and the least time of each stage, on a GPU or with --device=cpu",
    "compare": "no measurement: two results.json side by side: profile.py --mode=compare A/results.json B/results.json",
}
ALONE = {"ddp": True, "shard": "none", **dict.fromkeys(CUTS, 1)}  # fields that do nothing in one process
DIMENSIONS = {  # of --mode=scaling: the words of n processes
    "data": lambda n: [],
    "shard": lambda n: ["--shard=full"],
    "tensor": lambda n: [f"--tensor_parallel={n}"],
    "context": lambda n: [f"--context_parallel={n}"],
    "pipeline": lambda n: [f"--pipeline_parallel={n}"],
}
MEASURING = ("ladder", "each", "without", "attention", "optimizers", "sweep", "scaling")
FORMER = {"--fit": "--mode=predict", "--sweep": "--mode=sweep", "--compare": "--mode=compare A B"}
FORMER |= {"--peak_tflops": "--gpu=NAME or --device_file=FILE"}


def at_least(least):
    """A parser of whole numbers from `least` up."""

    def whole_number(text):
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least {least}")

    return whole_number


def positive(text):
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text}: expected a positive number")


def fraction(text):
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) <= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text}: expected a fraction above 0, up to 1, such as 0.4")


def learning_rate_factors(text):
    """Parses "0.3,1,3" into its numbers in ascending order, each once."""
    try:
        return sorted({positive(word) for word in text.split(",")})
    except argparse.ArgumentTypeError:
        message = f"{text}: expected positive numbers, separated by commas, such as 0.3,1,3"
        raise argparse.ArgumentTypeError(message) from None


def one_of(*names):
    """A parser of one of these names."""

    def name(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown {text!r}{nearest(text, names)}; expected {', '.join(names)}")
        return text

    return name


def stages(text):
    """Parses "amp,flash" into these stages in the ladder's order, naive first."""
    asked = [one_of(*stage_names())(stage) for stage in text.split(",")]
    return [stage for stage in stage_names() if stage in ["naive", *asked]]


def part_of_results(options):
    """The name under which results keep a mode: scaling-tensor and the like for scaling along another dimension."""
    along = options.mode == "scaling" and options.dimension != "data"
    return f"scaling-{options.dimension}" if along else options.mode


class Option(NamedTuple):
    """An option of profile.py: the modes that use it, the parser of its text (None: a switch), and its default text."""

    modes: tuple
    parse: Callable | None
    default: str | None
    meaning: str


OPTIONS = {
    "stages": Option(
        ("ladder", "each", "without", "predict"),
        stages,
        None,
        "comma-separated names (default: all stages, and with --mode=each all optimizers)",
    ),
    "steps": Option((*MEASURING, "peers"), at_least(1), "4", "least number of steps that a process times"),
    "repeats": Option((*MEASURING, "losses", "peers"), at_least(1), "3", "processes that time each row"),
    "trace": Option(MEASURING[:-1], None, None, "write a Chrome trace of each row to OUT_DIR/traces"),
    "out_dir": Option(
        (*MEASURING, "losses", "judge", "tune", "peers", "predict"),
        str,
        None,
        "folder of the results (default: results/<machine>/<config>; predict writes predict.md only if it is given)",
    ),
    "train_steps": Option(("optimizers",), at_least(1), "300", "length of each training run"),
    "grid": Option(
        ("optimizers",),
        learning_rate_factors,
        "0.3,1,3",
        "multiples of each optimizer's learning rate to try; extended beyond an end that does best",
    ),
    "processes": Option(("scaling",), at_least(2), None, "largest number of processes"),
    "dimension": Option(
        ("scaling",),
        one_of(*DIMENSIONS),
        "data",
        "data|shard: a batch for each process; tensor|context|pipeline: one batch for all",
    ),
    "against": Option(("judge",), str, None, "the other version: a commit, branch or tag; HEAD: before your changes"),
    "patch": Option(("judge",), str, None, "judge the working tree with this patch (default of --against: without it)"),
    "metric": Option(
        ("judge",),
        one_of("speed", "memory", "loss"),
        "speed",
        "speed|memory|loss: which decides; loss: the validation loss after whole training runs, a seed each round",
    ),
    "rounds": Option(("judge",), at_least(6), "24", "most rounds of a process of each version; fewer if one is clear"),
    "minutes": Option(("tune",), positive, "10", "how long the search takes; the same command with more continues it"),
    "tuned_dir": Option(
        ("tune", "peers"), str, "config/tuned", "tune writes <machine>/<config>.py there, and peers measures it"
    ),
    "nanogpt": Option(("peers",), str, None, "a checkout of nanoGPT, whose train.py is run"),
    "memory_gb": Option(
        ("predict", "tune"),
        positive,
        None,
        "memory in GB: predict finds the largest micro-batch and the longest context that fit; tune keeps to it",
    ),
    "world_size": Option(("predict",), at_least(1), "1", "processes of the predicted run"),
    "mfu": Option(("predict",), fraction, "0.4", "fraction of the device's peak that a real run is assumed to reach"),
    "gpu": Option(("predict",), str, None, f"by its datasheet: {', '.join(DATASHEETS)} (default: one here, or H100)"),
    "device_file": Option(("predict",), str, None, "JSON file with the limits of another device"),
    "price_per_hour": Option(("predict",), positive, None, "of one device, in any currency: adds what the run costs"),
}


def parse(argv):
    """Splits a command line into the options of profile.py and the rest: the config's words, or the paths to compare.

    options.given: the config's words as they were typed, without those that measuring adds.
    Raises BadInput for options that are wrong or that the mode does not use, and for a config that cannot be measured.
    """
    if "WORLD_SIZE" in os.environ:
        raise BadInput(
            "profile.py starts its processes itself, and torchrun (which sets WORLD_SIZE) started this one; expected "
            "`python profile.py config/x.py --mode=scaling --processes=N`"
        )
    options, words = split(argv)
    if options.mode == "compare":
        if len(words) != 2 or any(word.startswith("-") for word in words):
            raise BadInput(
                f"--mode=compare {' '.join(words)}: expected the paths of two results.json, and nothing else"
            )
        return options, words
    if options.mode == "scaling" and options.processes is None:
        raise BadInput("--mode=scaling: expected the largest number of processes, such as --processes=2")
    measured = measurable(options, words)  # first, as `given` is no option to suggest
    options.given = words
    return options, measured


def split(argv):
    """The options, defaults filled in, and the words that are none. Raises BadInput if the mode does not use one."""
    parser = Parser(
        usage="python profile.py config/x.py [more.py ...] [--mode=MODE] [options] [--key=value ...]",
        description=description(),
        epilog="The keys of the config are options too: `python train.py --help` lists them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--mode", type=one_of(*MODES), default="ladder", metavar="MODE", help="see above")
    for name, option in OPTIONS.items():
        default = f" (default: {option.default})" if option.default else ""
        of = "" if option.modes == MEASURING else f"{', '.join(option.modes)}: "
        kind = {"type": option.parse} if option.parse else {"action": "store_true"}
        parser.add_argument(f"--{name}", help=of + option.meaning + default, **kind)
    options, words = parser.parse_known_args(argv)
    for word in words:
        if (name := word.partition("=")[0]) in FORMER:
            raise BadInput(f"{name}: no such option; expected {FORMER[name]}")
    for name, option in OPTIONS.items():
        if name not in options:
            setattr(options, name, option.parse(option.default) if option.default else None)
        elif options.mode not in option.modes:
            modes = "|".join(option.modes)
            raise BadInput(f"--{name}: --mode={options.mode} does not use it; expected --mode={modes}, or no --{name}")
    return options, words


def description():
    """The head of --help: the modes."""
    head = "Measures on this machine the speed, memory and loss of each stage of the ladder.\n\nmodes:"
    lines = [textwrap.fill(meaning, 100, subsequent_indent=" " * 14) for meaning in MODES.values()]
    return "\n".join([head, *(f"  {mode:<12}{line}" for mode, line in zip(MODES, lines, strict=True))])


def measurable(options, config_words):
    """The config's words with what measuring adds to them. Raises BadInput for a config that the mode cannot take."""
    config = load_config(config_words, vars(options))
    if config.micro_batch_size == "auto":
        raise BadInput(
            "micro_batch_size=auto is found when training starts; expected a number, or --mode=sweep, which measures "
            "every size"
        )
    if config.stage and options.mode in ("ladder", "each"):
        raise BadInput(f"stage={config.stage}: --mode={options.mode} sets it; choose rows with --stages=a,b,c")
    added = []
    if config.batch_warmup_steps:
        added.append("--batch_warmup_steps=0")  # the whole batch is measured
    several = options.mode in ("optimizers", "sweep", "predict", "judge", "tune") or options.dimension == "pipeline"
    one_micro_batch = config.micro_batch_size and not several
    if one_micro_batch and not any(word.startswith("--batch_size") for word in config_words):
        added.append(f"--batch_size={config.micro_batch_size}")  # a step of one micro-batch: large presets run too
    return [*config_words, *added]


def rows(options, config_words):
    """{row: the words that make its config of the base's}. The others are compared with the first."""

    def file(stage):
        return os.path.relpath(stage_files(stage)[-1])

    chosen = options.stages or stages_of(1)
    above = chosen[1:]
    optimizers = get_args(TYPES["optimizer"])
    match options.mode:
        case "ladder":
            found = {stage: [f"--stage={stage}"] for stage in chosen}
            return found if is_a_stage(config_words) else found | {"as configured": []}
        case "each":
            found = {stage: [file("naive"), file(stage)] for stage in above}
            found = {"naive": [file("naive")], **found, "all applied": [file("naive"), *map(file, above)]}
            measured = [load_config([*config_words, *words]).optimizer for words in found.values()]
            others = [name for name in optimizers if name not in measured and not options.stages]
            return found | {name: [file("naive"), f"--optimizer={name}"] for name in others}
        case "without":
            return {"finished": [], **{f"without {stage}": turned_off(stage) for stage in above}}
        case "attention":
            others = [name for name in get_args(TYPES["attention"]) if name not in ("auto", "sdpa")]
            return {name: [f"--attention={name}"] for name in ["sdpa", *others]}
        case "optimizers":
            return {name: [f"--optimizer={name}"] for name in optimizers}
        case "sweep":
            total = load_config(config_words).batch_size
            return {f"{total // size} × {size}": [f"--micro_batch_size={size}"] for size in divisors(total)}
        case "scaling":
            share = load_config(config_words).batch_size
            counts = [n for n in range(1, options.processes + 1) if n == options.processes or n & (n - 1) == 0]
            if part_of_results(options) in tables.PER_PROCESS:
                return {str(n): [f"--batch_size={n * share}", *DIMENSIONS[options.dimension](n)] for n in counts}
            return {str(n): DIMENSIONS[options.dimension](n) for n in counts}


def stages_of(n):
    """The stages that can do something in n processes."""
    return [stage for stage in stage_names() if n > 1 or not needs_several(stage)]


def training_run(options, config_words, factor):
    """The words of a run of --train_steps steps whose learning rates are multiplied by a factor."""
    config, steps = load_config(config_words), options.train_steps
    rates = [f"--{key}={factor * getattr(config, key)!r}" for key in ("learning_rate", "min_lr")]
    warmup_steps = min(config.warmup_steps, steps // 10)
    return [f"--max_steps={steps}", f"--warmup_steps={warmup_steps}", "--lr_decay_steps=0", *rates]


def turned_off(stage):
    """The words that give a stage's fields the values that they have below it."""
    below = fields_up_to(stage_below(stage))
    return [f"--{field}={ast.literal_eval(below[field])}" for field in fields(stage)]


def is_a_stage(config_words):
    """True if the config trains as one of the ladder's stages does, so that it needs no row of its own."""
    config = here(load_config(config_words))
    for stage in stage_names():
        with contextlib.suppress(BadInput):
            if here(load_config([*config_words, f"--stage={stage}"])) == config:
                return True
    return False


def here(config):
    """The config in its normal form on this machine."""
    device = choose_device(config.device)
    return in_one_process(config, device.type, choose_dtype(config.dtype, device))


def in_one_process(config, device_type, dtype):
    """The config in a normal form: two configs that train alike in one process have the same."""
    attention = "blocks" if uses_blocks(config, device_type, dtype) else config.attention.replace("auto", "sdpa")
    micro_batch_size = config.micro_batch_size % config.batch_size
    n_tokens = (micro_batch_size or config.batch_size) * config.context_length
    loss_chunks = count_chunks(config.loss_chunks, n_tokens, config.padded_vocab_size)
    same = {"attention": attention, "micro_batch_size": micro_batch_size, "loss_chunks": loss_chunks}
    return dataclasses.replace(config, stage="", **same, **ALONE)


def not_applicable(rows, mode, config_words):
    """{row: reason} of the rows not to be measured: no valid config, or that of the row they are compared with."""
    reasons, configs = {}, {}
    for name, words in rows.items():
        try:
            config = load_config([*config_words, *words])
        except BadInput as error:
            reasons[name] = str(error)
            continue
        config = here(config)
        compared = row_below(name, configs) if mode == "ladder" else next(iter(configs), None)
        if mode != "scaling" and compared and config == configs[compared]:
            reasons[name] = "not applicable: in one process here the same as the row that it is compared with"
        configs[name] = config
    return reasons
