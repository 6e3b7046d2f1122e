"""The command line of profile.py: its modes and the options of each."""

import argparse
import contextlib
import math
import os
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from lab.measure.peers import recipes, task
from lab.predict.devices import DATASHEETS
from nanoladder.config import parse_arguments, stage_names
from nanoladder.config.stages import LADDERS, RECIPE_DIR
from nanoladder.entry import Parser
from nanoladder.errors import BadInput, nearest
from nanoladder.run import load_config

REFUSED = {  # {(mode, option of the config): why the mode refuses it, and what to do}
    ("ladder", "stage"): "--mode=ladder sets it; choose rows with --stages=a,b,c",
    ("recipe", "recipe"): "--mode=recipe measures every rung; expected no --recipe",
}
DIMENSIONS = ("data", "shard", "tensor", "context", "pipeline")  # of --mode=scaling


# -- parsers of options


def number(kind, accepts, expected):
    """Makes a parser of numbers that satisfy `accepts`. expected: a description of these numbers."""

    def parse(text):
        with contextlib.suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")

    return parse


def at_least(least: int) -> Callable[[str], int]:
    return number(int, lambda n: n >= least, f"a whole number of at least {least}")


positive = number(float, lambda n: 0 < n < math.inf, "a positive number")
fraction = number(float, lambda n: 0 < n <= 1, "a fraction above 0, up to 1, such as 0.4")


def factors(text):
    """Parses "0.5,1" into [0.5, 1.0]."""
    return [positive(factor) for factor in text.split(",")]


def one_of(*names):
    """Makes a parser that accepts one of these names."""

    def name(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown {text!r}{nearest(text, names)}; expected {', '.join(names)}")
        return text

    return name


def stages(text):
    """Parses "amp,flash" into these stages in the ladder's order, naive first."""
    asked = [one_of(*stage_names())(stage) for stage in text.split(",")]
    return [stage for stage in stage_names() if stage in ["naive", *asked]]


def rungs(text):
    """Parses "muon,rotary" into these rungs of the second ladder, in its order."""
    _, *names = stage_names(RECIPE_DIR)
    asked = [one_of(*names)(name) for name in text.split(",")]
    return [name for name in names if name in asked]


def varied(text):
    """Parses "attention=matmul,sdpa" into [{"attention": "matmul"}, {"attention": "sdpa"}]; "stages" stays as it is."""
    key, equals, values = text.partition("=")
    if text == "stages":
        return text
    if not (equals and values) or key in LADDERS:
        raise argparse.ArgumentTypeError(f"{text}: expected stages, or KEY=a,b,c (config files come before --vary)")
    parsed = [parse_arguments([f"--{key}={value}"])[-1] for value in values.split(",")]
    if {"micro_batch_size": "auto"} in parsed:
        raise argparse.ArgumentTypeError(f"{text}: auto is resolved when training starts; expected numbers")
    return parsed


# -- modes and options


class Mode(NamedTuple):
    meaning: str
    options: tuple


TIMING = ("minutes", "out_dir")
MODES = {
    "ladder": Mode("each stage, on top of the stages below it (the default)", ("stages", *TIMING)),
    "vary": Mode("the config with other values of its keys (implied by --vary)", ("vary", "train", *TIMING)),
    "scaling": Mode("1, 2, 4, ... processes on this machine, along a dimension", ("processes", "dimension", *TIMING)),
    "judge": Mode(
        "the working tree against another version: a gain, or noise? Exit code 0: better, or no visible change; "
        "1: worse or wrong; 2: bad input",
        ("against", "metric", "rounds", "out_dir"),
    ),
    "recipe": Mode(
        "how many tokens each rung of the second ladder saves, by whole training runs",
        ("minutes", "on", "rungs", "kept", "out_dir"),
    ),
    "by_loss": Mode(
        "how many tokens each rung saves, as a function of the loss, from runs of several lengths",
        ("minutes", "rungs", "out_dir"),
    ),
    "race": Mode(
        "how much faster whole runs reach the final loss of another config, or of nanoGPT's own command, and where "
        "other projects' recipes end after as many steps",
        ("against", "nanogpt", *recipes.RECIPES, "rates", "seeds", "out_dir"),
    ),
    "peers": Mode(
        "the loop against Hugging Face's Trainer, Lightning, nanoGPT and nanochat", (*task.CHECKOUTS, *TIMING)
    ),
    "predict": Mode(
        "what a run will cost: memory and least time of each stage or, with --vary, of each value, on a GPU or with "
        "--device=cpu",
        ("stages", "vary", "gpu", "world_size", "memory_gb", "mfu", "price_per_hour", "out_dir"),
    ),
}
OPTIONS = {  # {name: (parser of its text, or None for a switch, default, meaning)}
    "vary": (
        varied,
        None,
        "KEY=a,b,c ...: a row for each combination of these values; stages: a row for each stage, removed from the "
        "config or, if the config lacks it, added",
    ),
    "stages": (stages, None, "comma-separated stages (default: all that have an effect here)"),
    "out_dir": (str, None, "folder for the results (default: results/<machine>/<config>; predict writes none)"),
    "train": (None, False, "train every row for its max_steps and compare losses, not step times"),
    "processes": (at_least(2), None, "largest number of processes"),
    "dimension": (one_of(*DIMENSIONS), "data", "|".join(DIMENSIONS) + ": the first two add a batch per process"),
    "against": (str, None, "judge: a commit, branch or tag; HEAD: before your changes; race: the other config"),
    "metric": (one_of("speed", "memory", "loss"), "speed", "speed|memory|loss (of whole runs): what to compare"),
    "rounds": (at_least(6), 24, "maximum number of rounds, one process of each version; stops early if clear"),
    "seeds": (at_least(1), 3, "runs of each config"),
    "minutes": (
        positive,
        15,
        "minutes to measure in (recipe, by_loss: to start runs in; repeat the command to continue)",
    ),
    "on": (rungs, None, "comma-separated rungs that the base already has"),
    "rungs": (rungs, None, "comma-separated rungs to measure (default: all; recipe: all that the base lacks)"),
    "kept": (rungs, None, "rungs kept at another scale: measured together, without each, and each alone"),
    "nanogpt": (str, None, "path of a nanoGPT checkout, whose train.py is run"),
    "nanochat": (str, None, "path of a nanochat checkout, whose model and optimizer are trained"),
    "autoresearch": (str, None, "path of an autoresearch checkout, likewise"),
    "modded": (str, None, "path of a modded-nanogpt checkout, likewise, of its track 3"),
    "rates": (factors, [1.0], "0.5,1,...: factors of all learning rates of these peers, a row each"),
    "memory_gb": (positive, None, "memory in GB: names the largest micro-batch that fits"),
    "world_size": (at_least(1), 1, "number of processes of the predicted run"),
    "mfu": (fraction, 0.4, "fraction of the device's peak that a real run is assumed to reach"),
    "gpu": (str, None, f"datasheet to use: {', '.join(DATASHEETS)} (default: the GPU here, or H100)"),
    "price_per_hour": (positive, None, "price of one device, in any currency: adds the cost of the run"),
}


# -- the command line


def parse(argv):
    """Splits a command line into profile.py's options and the config's arguments, and adds those that measuring needs.

    Raises BadInput for options that are wrong or that the mode does not use, and for a config that it cannot measure.
    """
    if os.environ.get("WORLD_SIZE"):
        raise BadInput(
            "profile.py starts its processes itself, but torchrun (which sets WORLD_SIZE) started this one; expected "
            "`python profile.py config/x.py --mode=scaling --processes=N`"
        )
    options, words = split(argv)
    if options.mode == "scaling" and options.processes is None:
        raise BadInput("--mode=scaling: expected the largest number of processes, such as --processes=2")
    if options.mode == "vary" and (not options.vary or ("stages" in options.vary and len(options.vary) > 1)):
        raise BadInput("--mode=vary: expected --vary KEY=a,b,c ..., or --vary=stages alone")
    if options.mode == "predict" and "stages" in (options.vary or []):
        raise BadInput("--mode=predict: each stage is a row without --vary=stages; expected --vary KEY=a,b,c ...")
    config = load_config(words, vars(options))
    if config.micro_batch_size == "auto":
        raise BadInput(
            "micro_batch_size=auto is resolved when training starts; expected a number, or --vary micro_batch_size=8,16"
        )
    for option, name in parse_arguments(words)[1].items():
        if why := REFUSED.get((options.mode, option)):
            raise BadInput(f"{option}={name}: {why}")
    whole = options.mode in ("predict", "judge", "recipe", "by_loss", "race") or options.dimension == "pipeline"
    whole = whole or options.train or any(word.startswith("--batch_size") for word in words)
    if config.micro_batch_size and not whole:
        words = [*words, f"--batch_size={config.micro_batch_size}"]  # a step of one micro-batch: large presets run too
    if options.mode == "peers":
        task.require_comparable(load_config(words), {peer: getattr(options, peer) for peer in task.CHECKOUTS})
    return options, words


def split(argv):
    """Returns the options and the rest. Prints --help. Raises BadInput for an option that the mode ignores."""
    options, words = parser_of("ladder", add_help=False).parse_known_args(argv)
    mode = options.mode = options.mode or ("vary" if options.vary else "ladder")
    if not {"-h", "--help"}.isdisjoint(words):
        parser_of(mode).parse_args(["--help"])
    given = [word[2:].partition("=")[0] for word in argv if word.startswith("--")]
    if others := [name for name in given if name in OPTIONS and name not in MODES[mode].options]:
        modes = "|".join(other for other in MODES if others[0] in MODES[other].options)
        raise BadInput(f"--{others[0]}: --mode={mode} does not use it; expected --mode={modes}, or no --{others[0]}")
    return options, words


def parser_of(mode, **settings):
    """Makes the parser of all options, whose help shows those of one mode."""
    lines = [f"\n{'':14}".join(textwrap.wrap(mode.meaning, 66)) for mode in MODES.values()]
    head = "Measures on this machine the speed, memory and loss of each stage of the ladder.\n\nmodes:"
    parser = Parser(
        usage=f"python profile.py config/x.py [--mode={mode}] [options] [--key=value]",
        description="\n".join([head, *(f"  {name:<12}{line}" for name, line in zip(MODES, lines, strict=True))]),
        epilog="--mode=MODE --help: the options of a mode; python train.py --help: all keys",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **settings,
    )
    parser.add_argument("--mode", type=one_of(*MODES), metavar="MODE", help="(default: ladder)")
    for name, (parse, default, meaning) in OPTIONS.items():
        kind: dict = {"type": parse, "default": default} if parse else {"action": "store_true"}
        several: dict = {"nargs": "+", "metavar": "KEY=a,b"} if name == "vary" else {}
        meaning += f" (default: {default})" if default else ""
        shown = meaning if name in MODES[mode].options else argparse.SUPPRESS
        parser.add_argument(f"--{name}", help=shown, **kind, **several)
    return parser


def command_line(keys: dict) -> list[str]:
    """Returns command-line arguments that set these keys."""
    return [f"--{key}={value}" for key, value in keys.items()]


def part_of_results(options):
    """Returns the name of a mode in runs.jsonl, such as scaling-tensor or vary-attention."""
    match options.mode:
        case "scaling" if options.dimension != "data":
            return f"scaling-{options.dimension}"
        case "vary":
            keys = [part if part == "stages" else next(iter(part[0])) for part in options.vary]
            return "-".join(["train" if options.train else "vary", *keys])
    return options.mode
