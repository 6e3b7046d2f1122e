"""Races a config to another one's loss: python profile.py config/x.py --mode=race --against=config/y.py

For each seed three commands train to their end, one after the other:

- naive: the other config by the naive loop;
- loop: the other config as it is, so by the finished loop: the first ladder's share;
- both: this config, whose recipe is the second ladder's share.

With --nanogpt=PATH there are two: nanoGPT, the command that its README gives for a laptop (or --against=WORDS), by the
code of that checkout; and ours, this config.

A time is a whole command's, from its start to its exit: imports, compilation from an empty cache and validation count.
A loss is that of a finished schedule; the picture shows training losses by themselves. The same command continues.
"""

import dataclasses
import statistics
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np

from lab.measure import cli, stats, tables
from lab.measure.git import commit
from lab.measure.launch import run_alone
from lab.measure.machine import machine_in_words
from lab.measure.measurements import machine_facts
from lab.measure.peers import nanogpt
from lab.measure.peers.task import require_checkout
from lab.measure.results import code_hash, default_folder, free_folder, under, write
from lab.measure.runs import PAUSE, RUNS, Runs
from lab.measure.training import Child
from lab.research.records import with_seeds
from nanoladder import files
from nanoladder.config import differences
from nanoladder.data import open_dataset
from nanoladder.data.counting import counted_losses
from nanoladder.errors import BadInput
from nanoladder.run import load_config
from nanoladder.run.metrics import draw_counted

COLORS = {"naive": "tab:red", "loop": "tab:blue", "both": "tab:green", "nanoGPT": "tab:red", "ours": "tab:green"}
LABELS = {"naive": "the naive loop", "loop": "the first ladder's loop", "both": "and the second ladder's recipe"}
LABELS |= {"nanoGPT": "nanoGPT's own command", "ours": "both ladders"}
HOW_TO_READ = """A time is a whole command's: imports, compilation from an empty cache and validation count. A loss is \
that of a finished schedule. speedup: the time of {first} with the same seed divided by this, in brackets an interval \
(docs/measuring.md)."""
COUNTED = {"what": "counted"}  # a row beside the runs
MARGIN = 0.15  # of the losses in the picture
SAME = "dataset", "context_length", "eval_windows"  # keys that a validation loss depends on


def race(options: Namespace, words: list[str]) -> None:
    """Trains what has not run yet; then writes race.md and race.png."""
    config = load_config(words)
    commands, runners, facts = (beside_nanogpt if options.nanogpt else beside_naive)(options, words, config)
    dataset = open_dataset(config)
    if "bytes" not in dataset.meta:
        raise BadInput(f"dataset={config.dataset} does not say how long its text is; prepare it by its prepare.py here")
    conditions = {"machine": run_alone(machine_facts, config), "config": words, **facts}
    conditions |= {"data": dataset.fingerprint(), "code": code_hash()}
    folder = Path(options.out_dir or free_folder(default_folder(conditions), "race.md", "race", under(conditions)))
    wanted = [{"name": name, "seed": seed} for seed in range(options.seeds) for name in commands]
    with Runs(folder / RUNS, "race", conditions, {"commit": commit()}) as runs:
        counted = counted_losses(dataset, config).items()
        runs.put(COUNTED, {name: {"loss": each, "bpb": each * dataset.bits_per_nat} for name, each in counted})
        list(runs.take(lambda: wanted, lambda row: runners[row["name"]](row["seed"])))
        results = conditions | {"runs": with_seeds(runs), "counted": runs.figures(COUNTED)}
    rows = table(results, commands)
    write(folder, {"race.md": report(results, rows, next(iter(commands)))})
    draw(results, folder / "race.png")
    for name, row in rows.items():
        print(f"{name}\n" + "\n".join(tables.wrapped(f"  {heading}: {text}") for heading, text in row.items()))
    print(f"\nwritten: {folder}/race.md, race.png and {RUNS}")


def beside_naive(options, words, config):
    """The commands, {name: text}, of a race against another config; functions that run each, of a seed; conditions."""
    if not options.against:
        raise BadInput("--mode=race: expected the other config, --against=config/y.py, or --nanogpt=PATH")
    other = options.against.split()
    configs = {"naive": load_config([*other, "--stage=naive"]), "loop": load_config(other), "both": config}
    for key in SAME:
        if (this := getattr(config, key)) != (that := getattr(configs["loop"], key)):
            raise BadInput(f"--against={options.against}: {key}={that}, here {this}; expected the same validation")
    commands = zip(configs, ([*other, "--stage=naive"], other, words), strict=True)
    runners = {name: partial(run_config, config) for name, config in configs.items()}
    keys = {name: differences(config) for name, config in configs.items()}
    return {name: " ".join(command) for name, command in commands}, runners, {"against": other, "keys": keys}


def beside_nanogpt(options, words, config):
    """Returns the same for a race against nanoGPT's command."""
    require_checkout("nanogpt", options.nanogpt)
    if config.eval_windows:
        raise BadInput(f"eval_windows={config.eval_windows}: nanoGPT evaluates on all; expected --eval_windows=0")
    other = (options.against or nanogpt.LAPTOP).split()
    runners = {"nanoGPT": partial(nanogpt.run, options.nanogpt, other, config), "ours": partial(run_config, config)}
    facts = {"against": other, "nanogpt": code_hash(Path(options.nanogpt), ("*.py", "config/*.py"))}
    return {"nanoGPT": " ".join(other), "ours": " ".join(words)}, runners, facts | {"keys": differences(config)}


def run_config(config, seed):
    """A run of a config."""
    return run(cli.command_line(differences(dataclasses.replace(config, seed=seed, save_interval=0))))


def run(words, **settings):
    """A run: its seconds, tokens, loss in nats per token and in bits per byte, and training losses in bits per byte,
    with their seconds.

    words: its command-line arguments. settings: its Child's. Raises BadInput if it fails.
    """
    curve = {}
    with tempfile.TemporaryDirectory() as cache, Child(words, {"TORCHINDUCTOR_CACHE_DIR": cache}, **settings) as child:
        while not (outcome := child.outcome()):
            time.sleep(PAUSE)
            for row in child.metrics():
                if "train_loss" in row:
                    curve.setdefault(row["step"], (time.monotonic() - child.start, row["train_loss"]))
    if outcome["note"]:
        raise BadInput(f"`train.py {' '.join(words)}` {outcome['note']}")
    final, bpb, seconds, tokens = (outcome[key] for key in ("val_loss", "val_bpb", "seconds", "tokens"))
    points = [[round(at, 1), loss * bpb / final] for at, loss in curve.values()]
    return {"seconds": seconds, "tokens": tokens, "loss": final, "bpb": bpb, "curve": [*points, [seconds, bpb]]}


def units(runs):
    """Returns the units of times and losses: seconds in a unit, its name, the key of a loss, its unit's name.

    A race against nanoGPT has nats per token, as nanoGPT has.
    """
    time = (60, "minutes") if max(run["seconds"] for run in runs) > 300 else (1, "seconds")
    return *time, *(("loss", "nats/token") if runs[0]["name"] == "nanoGPT" else ("bpb", "bits/byte"))


def table(results, commands):
    """Returns the table of the runs, {name: {heading: text}}. The others are compared with the first command."""
    runs, rows, (first, *others) = results["runs"], {}, commands
    unit, time, key, loss = units(runs)
    first_loss = stats.by_seed(runs, first, key)
    logs = {name: stats.paired(runs, first, name, "seconds", stats.log_ratio) for name in others}
    speedups = {first: "1.00×", **stats.in_words(logs)}
    for name, command in commands.items():
        seconds, losses = (stats.by_seed(runs, name, figure) for figure in ("seconds", key))
        missed = [str(seed) for seed, each in losses.items() if each > first_loss[seed]]
        rows[name] = {
            "command: train.py": f"`{command}`",
            f"{time}, by seed": ", ".join(f"{each / unit:.{2 if unit > 1 else 1}f}" for each in seconds.values()),
            "speedup": speedups[name],
            f"{loss} at the end": ", ".join(f"{each:.4f}" for each in losses.values()),
            f"{first}'s loss": f"missed with seed {', '.join(missed)}" if missed else "reached by every seed",
        }
    return rows


def report(results, rows, first):
    """Returns race.md."""
    *_, key, loss = units(results["runs"])
    machine, how = machine_in_words(results["machine"]), HOW_TO_READ.format(first=first)
    if counted := ", ".join(f"{name} {each[key]:.4f}" for name, each in results.get("counted", {}).items()):
        how += f" Counted in the training data, on the same windows (docs/evaluation.md): {counted} {loss}."
    return "\n\n".join([f"## race: `{' '.join(results['config'])}`", f"{machine}. {how}", tables.texts(rows)])


def draw(results, path):
    """Draws the validation losses at the end, which are compared, and below them training losses, to a PNG.

    Both are drawn against the time since the command was typed.
    """
    from matplotlib.figure import Figure  # loads slowly

    figure = Figure(figsize=(9, 6), layout="constrained")
    ends, curves = figure.subplots(2, 1, sharex=True)
    runs = results["runs"]
    unit, time, key, loss = units(runs)
    for name in dict.fromkeys(run["name"] for run in runs):
        seconds, losses = (stats.by_seed(runs, name, figure).values() for figure in ("seconds", key))
        label = f"{LABELS[name]}: {statistics.median(seconds) / unit:.1f} {time}"
        ends.plot([each / unit for each in seconds], losses, "o", color=COLORS[name], label=label)
    for run in runs:
        curve = [[seconds / unit, bpb * run[key] / run["bpb"]] for seconds, bpb in run["curve"][:-1]]
        size = 1 + len(curve) // 20  # losses averaged into a point: single ones are noisy
        points = [np.mean(curve[i : i + size], axis=0) for i in range(0, len(curve), size)]
        curves.plot(*zip(*points, strict=True), color=COLORS[run["name"]], linewidth=1)
    target = statistics.fmean(stats.by_seed(runs, runs[0]["name"], key).values())
    ends.axhline(target, color="black", linewidth=0.8, linestyle=":", label="the loss to reach")
    low, high = (choose([target, *(run[key] for run in runs)]) for choose in (min, max))
    low, high = low - MARGIN, high + MARGIN
    counted = {name: each[key] for name, each in results.get("counted", {}).items()}
    draw_counted(ends, {name: each for name, each in counted.items() if low < each < high})
    ends.set(ylabel=f"validation, at the end\n({loss})", ylim=(low, high), xlim=(0, None))
    curves.set(xlabel=f"{time} since the command was typed", ylabel=f"training, on the way\n({loss})")
    for axis in (ends, curves):
        axis.grid(alpha=0.3)
    ends.legend()
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
