"""Measures what each stage of the ladder is worth on this machine: python profile.py config/x.py [options]

Every figure comes from train.py's own train_step on real batches, in a process of its own (measure.py), one process
at a time. A row's first process trains on the batches that naive trained on, keeps the losses, counts the bytes of
all tensors and looks where the time goes; the others time it. They take turns, row after row, so that a drift of
the machine hits all alike. Started by torchrun, it measures how the config scales up to that many processes. What an
optimizer is worth shows in whole runs only: --mode=optimizers trains them, a process each, before the rounds.
"""

import ast
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from lab import pages, pictures, predict, tables
from nanoladder.config import TYPES, load_config, stage_files, stage_names
from nanoladder.data.batches import open_dataset
from nanoladder.entry import Parser
from nanoladder.errors import BadInput

ROOT = Path(__file__).parents[1]
# What a figure depends on
MEASURED = ("*.py", "nanoladder/**/*.py", "lab/measure.py", "lab/predict.py", "config/stages/*.py")
OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


def main(argv):
    options, config_argv = parse(argv)
    if options.compare:
        print(tables.compare(*(tables.read(path) for path in options.compare)))
    elif options.fit:
        print(prediction(options, config_argv))
    elif options.rank == 0:  # of torchrun's processes the first measures, in processes of its own
        climb(options, config_argv)


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


def prediction(options, config_argv):
    """The text of --fit: what the run costs, and the memory of each stage on the device that the config names."""
    config = load_config(config_argv)
    words = list(config_argv)
    if not config.vocab_size:
        vocab_size = open_dataset(config.dataset, 0, config.context_length)[0]["vocab_size"]
        words.append(f"--vocab_size={vocab_size}")
    config = load_config(words)
    rows = [(stage, load_config([*words, f"--stage={stage}"])) for stage in options.stages if not config.stage]
    rows.append((config.stage or "as configured", config))
    return predict.report(
        config,
        rows,
        config.device.partition(":")[0].replace("auto", "cuda"),
        options.memory_gb,
        options.mfu,
        options.peak_tflops * 1e12,
        options.world_size,
    )


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


def climb(options, config_argv):
    """Measures every row that results.json does not hold yet, and writes it after each process."""

    folder, results = open_results(options, config_argv)
    rows = plan(options, config_argv)
    part = open_mode(options, config_argv, folder, results, rows)
    threads = max(1, results["machine"]["threads"] // options.processes)
    with tqdm(tasks(options, rows), unit="process") as bar:
        for name, what, count in bar:
            bar.set_postfix_str(f"{name or 'the machine'}, {what}")
            row = part["rows"][name] if name else part
            done = row.setdefault(what, [])
            if len(done) >= count or row.get("note"):
                continue
            words = [*config_argv, *row.get("words", [])]
            if what == "curve":
                tried = tables.factors(options.grid, [curve["val_loss"] for curve in done])
                if len(done) == len(tried):  # the best lies between others
                    continue
                words += schedule(options, config_argv, tried[len(done)])
            if what in ("time", "silent"):
                words.append(f"--steps={options.steps}")
            if options.mode == "scaling" and name:  # a process has as many threads alone as beside the others
                words.append(f"--threads={threads}")
            if options.trace and what == "examine":
                words.append(f"--trace={Path(folder, 'traces', name.replace(' ', '_'))}")
            try:
                done.append(run_alone(what, words, int(name) if options.mode == "scaling" and name else 1))
            except RuntimeError as error:
                row["note"] = str(error)
                bar.write(f"{name or 'the machine'}, {what}: {error}")
            tables.write(folder, results)
    pictures.draw(results, options.mode, folder / f"{options.mode}.png")
    print(tables.table(results, options.mode))
    print(f"written: {folder}/results.json, table.md and {options.mode}.png")


def open_results(options, config_argv):
    """The folder of the results, and what it holds. Raises BadInput if that was measured under other conditions."""
    config = load_config(config_argv)
    _, *splits = open_dataset(config.dataset, config.vocab_size, config.context_length)
    conditions = {
        "machine": run_alone("machine", config_argv),
        "config": config_argv,
        "keys": dataclasses.asdict(config),
        "data": [split.fingerprint() for split in splits],
        "steps": options.steps,
        "code": code_hash(),
    }
    names = "-".join(Path(word).stem for word in config_argv if word.endswith(".py"))
    folder = Path(options.out_dir or Path("results", machine_name(conditions["machine"]), names or "defaults"))
    path = folder / "results.json"
    if not path.exists():
        return folder, {"format_version": tables.FORMAT_VERSION, "commit": commit(), **conditions, "modes": {}}
    results = tables.read(path)
    if different := [key for key in conditions if results[key] != conditions[key]]:
        what = " and ".join(different)
        raise BadInput(f"{path} was measured under another {what}; choose another --out_dir, or remove it")
    return folder, results


def open_mode(options, config_argv, folder, results, rows):
    """The part of the results of the mode that is measured, with its rows in it."""
    runs = {"train_steps": options.train_steps, "grid": options.grid} if options.mode == "optimizers" else {}
    part = results["modes"].setdefault(options.mode, {**runs, "limits": [], "rows": {}})
    part.pop("note", None)
    if different := [key for key in runs if part[key] != runs[key]]:
        what = " and ".join(f"--{key}" for key in different)
        raise BadInput(f"{folder} was measured with another {what}; choose another --out_dir, or remove it")
    if part["rows"] and {name: row["words"] for name, row in part["rows"].items()} != rows:
        raise BadInput(f"{folder} holds other rows of --mode={options.mode}; choose another --out_dir, or remove it")
    reasons = not_applicable(rows, options.mode, config_argv)
    for name, words in rows.items():
        part["rows"].setdefault(name, {"words": words})["note"] = reasons.get(name)  # what failed is tried again
    try:
        tables.write(folder, results)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error}); choose another --out_dir") from None
    return part


def tasks(options, rows):
    """(row, what, how many times by then): correctness first, then rounds, in each the machine's own limits too.

    Every other round goes backwards: no row is always the first, or always behind the same one.
    """
    scaling = options.mode == "scaling"
    found = [] if scaling else [(name, "examine", 1) for name in rows]
    if options.mode == "optimizers":
        most = len(options.grid) + tables.BEYOND
        found += [(name, "curve", count) for name in rows for count in range(1, 1 + most)]
    for count in range(1, options.repeats + 1):
        found.append((None, "limits", count))
        for name in list(rows) if count % 2 else reversed(rows):
            found.append((name, "time", count))
            if scaling and options.replicated and name != "1":
                found.append((name, "silent", count))
    return found


def run_alone(what, words, processes=1):
    """Measures something in a new process, or in several. Raises RuntimeError with why if it fails."""
    command = ["-m", "lab.measure", what, *words]
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *command]
    environment = {key: value for key, value in os.environ.items() if not OF_TORCHRUN.fullmatch(key)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if process.returncode == -9 or "exitcode  : -9" in process.stderr:
        raise RuntimeError("killed by the system, most likely out of memory")
    said = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    reasons = [line for line in said if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    raise RuntimeError((reasons or said)[-1])


def machine_name(machine):
    """A folder's name for the machine, such as intel-xeon-2-threads-bf16 or nvidia-h200."""
    cpu = f"{tables.processor(machine)} {machine['threads']} threads" + " bf16" * machine["native_bfloat16"]
    name = machine["gpu"] or cpu
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def commit():
    """The commit that is checked out, with -dirty if files differ from it; None where that is not known."""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def code_hash():
    """Changes when the code that is measured changes."""
    files = [path for pattern in MEASURED for path in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
