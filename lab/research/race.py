"""Races a config to another one's loss: python profile.py config/x.py --mode=race --against=config/y.py

For each seed three commands train to their end, one after the other:

- naive: the other config by the naive loop;
- loop: the other config as it is, so by the finished loop: the first ladder's share;
- both: this config, whose recipe is the second ladder's share.

With --nanogpt=PATH there are two: nanoGPT, the command that its README gives for a laptop (or --against=WORDS), by the
code of that checkout; and ours, this config.

With --nanochat=PATH, --autoresearch=PATH or --modded=PATH there are more rows: this config's shape, steps and batches
by the recipe of that checkout, at its own rates times each of --rates. Without --against they race this config, ours.

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
from lab.measure.peers import nanogpt, recipes
from lab.measure.peers.task import CHECKOUTS, require_checkout
from lab.measure.results import ROOT, code_hash, default_folder, free_folder, under, write
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
COLORS |= {"nanochat": "tab:purple", "autoresearch": "tab:orange", "modded": "tab:brown"}  # at any rates
HOW_TO_READ = """A time is a whole command's: imports, compilation from an empty cache and validation count. A loss is \
that of a finished schedule. speedup: the time of {first} with the same seed divided by this, in brackets an interval \
(docs/measuring.md)."""
COUNTED = {"what": "counted"}  # a row beside the runs
MARGIN = 0.15  # of the losses in the picture
SAME = "dataset", "context_length", "eval_windows"  # keys that a validation loss depends on


def race(options: Namespace, words: list[str]) -> None:
    """Trains what has not run yet; then writes race.md and race.png."""
    config = load_config(words)
    contestants, facts = rows_of(options, words, config)
    dataset = open_dataset(config)
    if "bytes" not in dataset.meta:
        raise BadInput(f"dataset={config.dataset} does not say how long its text is; prepare it by its prepare.py here")
    conditions = {"machine": run_alone(machine_facts, config), "config": words, **facts}
    conditions |= {"data": dataset.fingerprint(), "code": code_hash()}
    folder = Path(options.out_dir or free_folder(default_folder(conditions), "race.md", "race", under(conditions)))
    wanted = [{"name": name, "seed": seed} for seed in range(options.seeds) for name in contestants]
    with Runs(folder / RUNS, "race", conditions, {"commit": commit()}) as runs:
        counted = counted_losses(dataset, config).items()
        runs.put(COUNTED, {name: {"loss": each, "bpb": each * dataset.bits_per_nat} for name, each in counted})
        list(runs.take(lambda: wanted, lambda row: contestants[row["name"]][1](row["seed"])))
        results = conditions | {"runs": with_seeds(runs), "counted": runs.figures(COUNTED)}
    rows = table(results, {name: command for name, (command, _) in contestants.items()})
    write(folder, {"race.md": report(results, rows, next(iter(rows)))})
    draw(results, folder / "race.png")
    for name, row in rows.items():
        print(f"{name}\n" + "\n".join(tables.wrapped(f"  {heading}: {text}") for heading, text in row.items()))
    print(f"\nwritten: {folder}/race.md, race.png and {RUNS}")


def rows_of(options, words, config):
    """{name: (command as text, function of a seed that runs it)} of a race, and conditions that its results depend on.

    The others are compared with the first row.
    """
    others, codes = recipe_rows(options, words, config)
    if options.nanogpt:
        rows, facts = nanogpt_rows(options, words, config)
    elif options.against:
        rows, facts = ladder_rows(options, words, config)
    elif others:
        rows, facts = {"ours": row_of(words, config)}, {"keys": differences(config)}
    else:
        paths = ", ".join(f"--{peer}=PATH" for peer in ("nanogpt", *recipes.RECIPES))
        raise BadInput(f"--mode=race: expected the other config, --against=config/y.py, or one of {paths}")
    return rows | others, facts | codes


def row_of(words, config):
    """The row of a config, which these words configure."""
    return f"train.py {' '.join(words)}", partial(run_config, config)


def ladder_rows(options, words, config):
    """The rows of another config by the naive loop and by the finished one, and of this config."""
    other = options.against.split()
    commands = {"naive": [*other, "--stage=naive"], "loop": other, "both": words}
    configs = {name: config if name == "both" else load_config(command) for name, command in commands.items()}
    for key in SAME:
        if (this := getattr(config, key)) != (that := getattr(configs["loop"], key)):
            raise BadInput(f"--against={options.against}: {key}={that}, here {this}; expected the same validation")
    keys = {name: differences(each) for name, each in configs.items()}
    return {name: row_of(commands[name], configs[name]) for name in commands}, {"against": other, "keys": keys}


def nanogpt_rows(options, words, config):
    """The rows of nanoGPT's command and of this config."""
    require_checkout("nanogpt", options.nanogpt, *CHECKOUTS["nanogpt"])
    if config.eval_windows:
        raise BadInput(f"eval_windows={config.eval_windows}: nanoGPT evaluates on all; expected --eval_windows=0")
    other = (options.against or nanogpt.LAPTOP).split()
    theirs = f"train.py {' '.join(other)}", partial(nanogpt.run, options.nanogpt, other, config)
    facts = {"against": other, "nanogpt": code_hash(Path(options.nanogpt), ("*.py", "config/*.py"))}
    return {"nanoGPT": theirs, "ours": row_of(words, config)}, facts | {"keys": differences(config)}


def recipe_rows(options, words, config):
    """The rows of other projects' recipes, at each of --rates; none without a checkout."""
    rows, codes = {}, {}
    for peer, (file, repository) in recipes.CHECKOUTS.items():
        if folder := getattr(options, peer):
            require_checkout(peer, folder, file, repository)
            codes[peer] = code_hash(Path(folder), (str(Path(file).parent / "*.py"),))
            for factor in options.rates:
                runner = partial(run_recipe, peer, str(Path(folder).resolve()), factor, config)
                rows[f"{peer}, rates × {factor:g}"] = f"{repository} by {' '.join(words)}", runner
    return rows, {"recipes": codes} if codes else {}


def run_config(config, seed):
    """A run of a config."""
    return run(cli.command_line(differences(dataclasses.replace(config, seed=seed, save_interval=0))))


def run_recipe(peer, checkout, factor, config, seed):
    """A run of a config by another project's recipe."""
    keys = cli.command_line(differences(dataclasses.replace(config, seed=seed)))
    words = ["lab.measure.peers.recipes", peer, checkout, str(factor), *keys]
    return run(words, script="-m", environment={"PYTHONPATH": str(ROOT)})


def run(words, environment=None, **settings):
    """A run: its seconds, tokens, loss in nats per token and in bits per byte, and training losses in bits per byte,
    with their seconds.

    words: its command-line arguments. environment: additional variables. settings: its Child's. Raises BadInput if it
    fails.
    """
    curve = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache} | (environment or {})
        with Child(words, environment, **settings) as child:
            while not (outcome := child.outcome()):
                time.sleep(PAUSE)
                for row in child.metrics():
                    if "train_loss" in row:
                        curve.setdefault(row["step"], (time.monotonic() - child.start, row["train_loss"]))
    if outcome["note"]:
        raise BadInput(f"`{' '.join(words)}` {outcome['note']}")
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
            "command": f"`{command}`",
            f"{time}, by seed": ", ".join(f"{each / unit:.{2 if unit > 1 else 1}f}" for each in seconds.values()),
            "speedup": speedups[name],
            f"{loss} at the end": ", ".join(f"{each:.4f}" for each in losses.values()),
            f"{first}'s loss": f"missed with seed {', '.join(missed)}" if missed else "reached by every seed",
        }
    return rows


def color(name):
    """The color of a row."""
    return COLORS[name.partition(",")[0]]


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
        label = f"{LABELS.get(name, name)}: {statistics.median(seconds) / unit:.1f} {time}"
        ends.plot([each / unit for each in seconds], losses, "o", color=color(name), label=label)
    for run in runs:
        curve = [[seconds / unit, bpb * run[key] / run["bpb"]] for seconds, bpb in run["curve"][:-1]]
        size = 1 + len(curve) // 20  # losses averaged into a point: single ones are noisy
        points = [np.mean(curve[i : i + size], axis=0) for i in range(0, len(curve), size)]
        curves.plot(*zip(*points, strict=True), color=color(run["name"]), linewidth=1)
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
    ends.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
