"""The options of profile.py, and the rows that each mode measures."""

import ast
import contextlib
import dataclasses
import math
import os
from typing import get_args

from lab import pages, predict
from nanoladder.config import TYPES, load_config, stage_files, stage_names
from nanoladder.entry import Parser
from nanoladder.errors import BadInput


def parse(argv):
    """The options, and the rest of the command line, which is the config's."""
    usage = "python profile.py config/x.py [more.py ...] [--key=value ...] [options]"
    parser = Parser(usage=usage, description="Measures the ladder on this machine.", allow_abbrev=False)
    parser.add_argument(
        "--mode",
        choices=["ladder", "each", "without", "optimizers"],
        default="ladder",
        help="ladder: each stage on top of those before; each: every stage and optimizer alone over naive; "
        "without: the config as it is, less one stage; optimizers: train with each, learning rates by --grid "
        "(default: %(default)s)",
    )
    parser.add_argument("--train_steps", type=int, default=300, help="of --mode=optimizers (default: %(default)s)")
    parser.add_argument(
        "--grid",
        default="0.3,1,3",
        help="of --mode=optimizers: times an optimizer's own rate, on beyond a best end (default: %(default)s)",
    )
    parser.add_argument("--sweep", action="store_true", help="instead: the batch in micro-batches of every size")
    parser.add_argument(
        "--fit", action="store_true", help="instead: predict the stages' memory on a GPU, or with --device=cpu on a CPU"
    )
    parser.add_argument("--memory_gb", type=float, default=0.0, help="of --fit: find the largest micro-batch for it")
    parser.add_argument("--world_size", type=int, default=1, help="of --fit: processes (default: %(default)s)")
    parser.add_argument("--mfu", type=float, default=0.4, help="of --fit: share of PEAK_TFLOPS (default: %(default)s)")
    parser.add_argument("--peak_tflops", type=float, default=989, help="of --fit: of a device (default: an H200's 989)")
    parser.add_argument("--compare", nargs=2, metavar="RESULTS", help="instead: set two results.json side by side")
    parser.add_argument("--stages", help="names, separated by commas (default: all, and in --mode=each the optimizers)")
    parser.add_argument("--steps", type=int, default=4, help="timed at least in one process (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed processes of each row (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="keep a Chrome trace of each row, in OUT_DIR/traces")
    parser.add_argument("--out_dir", help="default: results/<machine>/<config>")
    options, rest = parser.parse_known_args(argv)
    of_torchrun = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    options.rank, options.processes, local = (int(os.environ.get(key, default)) for key, default in of_torchrun)
    if options.processes != local:
        raise BadInput(f"{options.processes} processes, {local} of them here; expected all on one machine")
    if options.processes > 1:
        os.environ.pop("OMP_NUM_THREADS", None)  # torchrun's 1
    options.mode = "scaling" if options.processes > 1 else "sweep" if options.sweep else options.mode
    chosen = options.stages and options.mode == "each"  # the stages only
    options.optimizers = [] if chosen else get_args(TYPES["optimizer"])
    asked = options.stages.split(",") if options.stages else stage_names()
    if unknown := [stage for stage in asked if stage not in stage_names()]:
        raise BadInput(f"--stages={','.join(unknown)}: no such stage; `python pages.py` lists them")
    options.stages = [stage for stage in stage_names() if stage in ["naive", *asked]]
    if min(options.steps, options.repeats, options.train_steps) < 1:
        raise BadInput("--steps, --repeats and --train_steps: expected at least 1")
    options.grid = parse_grid(options.grid)
    config = load_config(rest)
    if config.micro_batch_size == "auto":
        raise BadInput("micro_batch_size=auto is for training; expected a number, or --sweep, which measures each")
    options.replicated = config.shard == "none"
    if config.batch_warmup_steps:
        rest.append("--batch_warmup_steps=0")  # what is measured is the whole batch
    if config.stage and options.mode in ("ladder", "each"):
        raise BadInput(f"stage={config.stage}: --mode={options.mode} sets it; choose rows with --stages=a,b,c")
    if min(options.memory_gb, options.world_size - 1, options.mfu - 1e-9, options.peak_tflops - 1e-9) < 0:
        raise BadInput("--memory_gb, --world_size, --mfu and --peak_tflops: expected positive numbers")
    whole = options.sweep or options.fit or options.mode == "optimizers"
    if config.micro_batch_size and not whole and not any(word.startswith("--batch_size") for word in rest):
        rest.append(f"--batch_size={config.micro_batch_size}")  # a step is one micro-batch: large presets run too
    return options, rest


def parse_grid(text):
    """The numbers of --grid in order."""
    with contextlib.suppress(ValueError):
        grid = sorted({float(word) for word in text.split(",")})
        if all(0 < factor < math.inf for factor in grid):
            return grid
    raise BadInput(f"--grid={text}: expected positive numbers, separated by commas, such as 0.3,1,3")


def plan(options, config_argv):
    """{row: the words that make its config of the base's}; the first row is what the others are compared with."""

    def file(stage):
        return os.path.relpath(stage_files(stage)[-1])

    above = [stage for stage in options.stages if stage != "naive"]
    match options.mode:
        case "ladder":
            rows = {stage: [f"--stage={stage}"] for stage in options.stages}
            return rows if is_a_stage(config_argv) else rows | {"as configured": []}
        case "each":
            rows = {stage: [file("naive"), file(stage)] for stage in above}
            rows = {"naive": [file("naive")], **rows, "all applied": [file("naive"), *map(file, above)]}
            measured = [load_config([*config_argv, *words]).optimizer for words in rows.values()]
            others = [name for name in options.optimizers if name not in measured]
            return rows | {name: [file("naive"), f"--optimizer={name}"] for name in others}
        case "without":
            return {"finished": [], **{f"without {stage}": turned_off(stage) for stage in above}}
        case "optimizers":
            return {name: [f"--optimizer={name}"] for name in options.optimizers}
        case "sweep":
            total = load_config(config_argv).batch_size
            return {f"{total // size} × {size}": [f"--micro_batch_size={size}"] for size in predict.divisors(total)}
        case "scaling":
            share = load_config(config_argv).batch_size
            counts = [n for n in range(1, options.processes + 1) if n == options.processes or n & (n - 1) == 0]
            return {str(n): [f"--batch_size={n * share}"] for n in counts}


def schedule(options, config_argv, factor):
    """The words of a whole run of --train_steps, with the learning rates times a factor."""
    config, steps = load_config(config_argv), options.train_steps
    rates = [f"--{key}={factor * getattr(config, key)!r}" for key in ("learning_rate", "min_lr")]
    warmup_steps = min(config.warmup_steps, steps // 10)
    return [f"--max_steps={steps}", f"--warmup_steps={warmup_steps}", "--lr_decay_steps=0", *rates]


def turned_off(stage):
    """The words that set a stage's fields back to what naive has."""
    naive = pages.fields("naive")
    return [f"--{field}={ast.literal_eval(naive[field])}" for field in pages.fields(stage)]


def is_a_stage(config_argv):
    """Whether the config as it is trains like a stage of its ladder."""
    for stage in stage_names():
        with contextlib.suppress(BadInput):
            if in_one_process(load_config([*config_argv, f"--stage={stage}"])) == in_one_process(
                load_config(config_argv)
            ):
                return True
    return False


def in_one_process(config):
    """The config, alike for all that trains alike in one process."""
    micro_batch_size = config.micro_batch_size % config.batch_size
    return dataclasses.replace(config, stage="", micro_batch_size=micro_batch_size, ddp=True, shard="none")


def not_applicable(rows, mode, config_argv):
    """{row: why it is not measured}, for a config that cannot be and one that is no other than the row's before."""
    reasons, configs = {}, []
    for name, words in rows.items():
        try:
            config = load_config([*config_argv, *words])
        except BadInput as error:
            reasons[name] = str(error)
            continue
        config = in_one_process(config)
        if configs and config == configs[-1 if mode == "ladder" else 0]:
            reasons[name] = "not applicable: in one process the same as the row that it is compared with"
        configs.append(config)
    return reasons
