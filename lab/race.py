"""How much sooner a config ends with another's loss: python profile.py config/x.py --mode=race --against=config/y.py

For each seed three commands train to their end, one after the other:

- naive: the other config by the naive loop;
- loop: the other config as it is, so by the finished loop: the first ladder's share;
- both: this config, whose recipe is the second ladder's share.

A time is a whole command's, from its start to its exit: imports, compilation from an empty cache and validation count.
A loss is that of a finished schedule; the picture's curves are training losses. The same command continues.
"""

import dataclasses
import math
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab import plan, stats, tables
from lab.launch import run_alone
from lab.measure import machine_facts
from lab.results import code_hash, default_folder, resume, write
from lab.trials import PAUSE, Child
from nanoladder import files
from nanoladder.config import differences
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.run import load_config

COLORS = {"naive": "tab:red", "loop": "tab:blue", "both": "tab:green"}
LABELS = {"naive": "the naive loop", "loop": "the first ladder's loop", "both": "and the second ladder's recipe"}
HOW_TO_READ = """A time is a whole command's: imports, compilation from an empty cache and validation count. A loss is \
that of a finished schedule. sooner: the naive loop's time of the same seed divided by this, in brackets an \
interval (docs/measuring.md)."""
SAME = "dataset", "context_length", "eval_windows"  # keys that a validation loss depends on


def race(options, words):
    """Trains what has not run yet; writes race.json, race.md and race.png after each run."""
    if not options.against:
        raise BadInput("--mode=race: expected the other config, --against=config/y.py")
    other = options.against.split()
    configs = {"naive": load_config([*other, "--stage=naive"]), "loop": load_config(other), "both": load_config(words)}
    for key in SAME:
        if (this := getattr(configs["both"], key)) != (that := getattr(configs["loop"], key)):
            raise BadInput(f"--against={options.against}: {key}={that}, here {this}; expected the same validation")
    conditions = {"machine": run_alone(machine_facts, configs["both"]), "config": words, "against": other}
    conditions |= {"data": open_dataset(configs["both"]).fingerprint(), "code": code_hash()}
    conditions["keys"] = {name: differences(config) for name, config in configs.items()}
    folder = Path(options.out_dir or default_folder(conditions))
    results = resume(folder / "race.json", conditions, {"runs": []})
    write(folder, {"race.json": results})  # fails now, rather than later, if it cannot be written
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child, as Ctrl-C does
    tasks, runs = [(seed, name) for seed in range(options.seeds) for name in configs], results["runs"]
    with tqdm(tasks, unit="run") as bar:
        for done, (seed, name) in enumerate(bar):
            bar.set_postfix_str(f"{name}, seed {seed}")
            if done == len(runs):
                config = dataclasses.replace(configs[name], seed=seed, save_interval=0)
                runs.append({"name": name, "seed": seed, **run(plan.command_line(differences(config)))})
                write(folder, {"race.json": results})
    commands = [*other, "--stage=naive"], other, words
    text = report(results, {name: " ".join(command) for name, command in zip(configs, commands, strict=True)})
    write(folder, {"race.md": text})
    draw(runs, folder / "race.png")
    print(f"{text}\n\nwritten: {folder}/race.md, beside race.json and race.png")


def run(words, **settings):
    """A run: its seconds, tokens, bits per byte, and training losses in that unit, with their seconds.

    words: of its command line. settings: of its Child. Raises BadInput if it fails.
    """
    curve = {}
    with tempfile.TemporaryDirectory() as cache:
        child = Child(words, {"TORCHINDUCTOR_CACHE_DIR": cache}, **settings)
        try:
            while not (outcome := child.outcome()):
                time.sleep(PAUSE)
                for row in child.metrics():
                    if "train_loss" in row:
                        curve.setdefault(row["step"], (time.monotonic() - child.start, row["train_loss"]))
        finally:
            child.end()
    if outcome["note"]:
        raise BadInput(f"`train.py {' '.join(words)}` {outcome['note']}")
    bpb, seconds = outcome["val_bpb"], outcome["seconds"]
    points = [[round(at, 1), loss * bpb / outcome["val_loss"]] for at, loss in curve.values()]
    return {"seconds": seconds, "tokens": outcome["tokens"], "bpb": bpb, "curve": [*points, [seconds, bpb]]}


def figures(runs, name, key):
    """A figure of a config's runs, by seed."""
    return [run[key] for run in runs if run["name"] == name]


def report(results, commands):
    """The table of the runs, and what they say."""
    runs, rows = results["runs"], {}
    naive_seconds, naive_bpb = (figures(runs, "naive", key) for key in ("seconds", "bpb"))
    sooner = {
        name: [
            math.log(other / this) for this, other in zip(figures(runs, name, "seconds"), naive_seconds, strict=True)
        ]
        for name in commands
        if name != "naive"
    }
    found = stats.intervals(sooner) if len(naive_seconds) >= stats.LEAST else {}
    for name, command in commands.items():
        seconds, bpb = (figures(runs, name, key) for key in ("seconds", "bpb"))
        middle = math.exp(statistics.fmean(sooner.get(name, [0.0])))  # of few seeds, which have no interval
        missed = [str(seed) for seed in range(len(bpb)) if bpb[seed] > naive_bpb[seed]]
        rows[name] = {
            "command: train.py": f"`{command}`",
            "minutes, by seed": ", ".join(f"{each / 60:.2f}" for each in seconds),
            "sooner": stats.times(found[name]) if name in found else f"{middle:.2f}×",
            "bits/byte at the end": ", ".join(f"{each:.4f}" for each in bpb),
            "naive's loss": f"missed with seed {', '.join(missed)}" if missed else "reached by every seed",
        }
    machine = tables.machine_in_words(results["machine"])
    return "\n\n".join([f"## race: `{' '.join(results['config'])}`", f"{machine}. {HOW_TO_READ}", tables.texts(rows)])


def draw(runs, path):
    """Draws training losses, and validation losses at the end, against minutes, to a PNG."""
    from matplotlib.figure import Figure  # loads slowly

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for run in runs:
        *curve, end = ([seconds / 60, bpb] for seconds, bpb in run["curve"])
        size = 1 + len(curve) // 20  # losses averaged into a point: single ones are noisy
        points = [np.mean(curve[i : i + size], axis=0) for i in range(0, len(curve), size)]
        label = LABELS[run["name"]] if run["seed"] == 0 else None
        axis.plot(*zip(*points, strict=True), color=COLORS[run["name"]], linewidth=1, label=label)
        axis.plot(*end, color=COLORS[run["name"]], marker="o")
    axis.axhline(statistics.fmean(figures(runs, "naive", "bpb")), color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="minutes since the command was typed", ylabel="bits/byte: training; ● validation", xlim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend()
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
