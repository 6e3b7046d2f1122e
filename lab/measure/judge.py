"""Judges a change, gain or noise: python profile.py config/x.py --mode=judge --against=COMMIT

Two versions run their own code and config, in separate processes, which one lab/ measures: "this", the working
tree, and "other", the commit. Both are copied to a temporary folder; the checkout and git's index are only read.

Their first losses must be equal. Then come rounds: a process of each lives and takes turns with the other (turns.py),
in an order that alternates. The differences within the rounds give a change and its interval (stats.py). It is looked
at several times, to stop early.
"""

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from lab.measure import tables
from lab.measure.cli import command_line
from lab.measure.git import git, unpack
from lab.measure.launch import Command
from lab.measure.results import ROOT, code_hash, default_folder
from lab.measure.runs import RUNS, Runs
from lab.measure.stats import LEVEL, SIDES, Interval, intervals, looks, order
from lab.measure.turns import differences, figures_of, take_turns, turns_of
from nanoladder.config import parse_arguments
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.run import load_config

LEAST = 5e-4  # a smaller relative change in memory counts as none
WAITING = 4  # batches: as much memory as these is there or not, as the loader's workers happen to be ahead
TURNS = 12  # of each version in a round
UNCHANGED = Interval(0.0, 0.0, 0.0)
PROFILE, VERDICT = {"what": "profile"}, {"what": "verdict"}  # rows beside the rounds


class Wrong(Exception):
    """Raised, with the reason, if this version does not train as the other does."""


class Metric(NamedTuple):
    """A figure of a process (lower is better), and how it is printed. size: of its unit.

    A change is the logarithm of a ratio, or with nats=True a difference.
    """

    heading: str
    measurement: str
    key: str
    better: str
    worse: str
    size: float = 1.0
    nats: bool = False

    def change(self, other, this):
        """The change of a loss or of the time of a step, from the figures of one process to another's."""
        if self.nats:
            return this[self.key] - other[self.key]
        return differences({1: turns_of(this)}, {1: turns_of(other)})[0]

    def text(self, change):
        """A change in its unit."""
        return f"{change:.4f} nats" if self.nats else f"{100 * math.expm1(change):.2f} %"


METRICS = {
    "speed": Metric("ms/step", "time", "seconds", "faster", "slower", 1e-3),
    "memory": Metric("tensors GB", "profile", "peak", "less memory", "more memory", 1e9),
    "loss": Metric("validation loss", "curve", "val_loss", "lower loss", "higher loss", nats=True),
}


def judge(options, config_words):
    """Judges, prints a table and, last, the verdict. Returns the exit code."""
    if not options.against:
        raise BadInput("--mode=judge: expected another version, --against=COMMIT")
    config = load_config(config_words)
    if config.dropout and options.metric != "loss":
        raise BadInput(f"dropout={config.dropout}: equal losses cannot be expected; expected --dropout=0")
    paths, tops, given = parse_arguments(config_words)
    given["dataset"] = open_dataset(config).folder.resolve()  # of this checkout, for both
    keys, metric = command_line(tops | given), METRICS[options.metric]
    with tempfile.TemporaryDirectory(prefix="judge-") as folder:
        folder = Path(folder).resolve()
        names = check_out(folder, options.against)
        start = functools.partial(process_of, folder, [os.path.relpath(path, ROOT) for path in paths], keys)
        ask = functools.partial(measure, names, start)
        conditions = {"names": names, "code": {side: code_hash(folder / side, ["**/*.py"]) for side in SIDES}}
        conditions |= {"machine": ask(["other"], "machine")["other"]}
        conditions |= {"config": config_words, "keys": dataclasses.asdict(config)}
        path = Path(options.out_dir or default_folder(conditions), RUNS)
        with Runs(path, f"judge-{options.metric}", conditions, anew=True) as runs:
            if VERDICT in runs:  # else it was interrupted
                runs.restart()
            try:
                figures, change = compare(options, config, ask, runs)
                verdict = decide(metric, change)
                print(table(metric, names, figures, change))
            except Wrong as reason:
                verdict = {"kind": "wrong", "text": f"WRONG: {reason}"}
            runs.add(VERDICT, verdict)
    print(f"written: {path}\n{verdict['text']}")
    return int(verdict["kind"] in ("worse", "wrong"))


def check_out(folder, against):
    """Fills folder/this and folder/other, and returns {side: its name}. Raises BadInput.

    this: the code of the working tree as it stands. other: the commit `against`, with the lab/ of this.
    """
    failed = "--mode=judge takes two versions of a git checkout"
    head = git("rev-parse", "--short", "HEAD", failed=failed)
    changed = git("status", "--porcelain", "--", "*.py", failed=failed)
    this, other = folder / "this", folder / "other"
    this.mkdir(parents=True)
    unpack(against, other, failed=f"--against={against}: expected a commit or branch")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, this)
    for name in ("config", "lab", "nanoladder", "operators"):
        shutil.copytree(ROOT / name, this / name)
    shutil.copytree(ROOT / "lab", other / "lab", dirs_exist_ok=True)
    return {"other": against, "this": f"{head} + changes" if changed else head}


def process_of(folder, paths, keys, side, measurement, *more):
    """A process of a version, with its own config files at these paths or, if it lacks one, this checkout's."""
    root = folder / side
    configs = [root / path if (root / path).exists() else ROOT / path for path in paths]
    return Command(measurement, [*map(str, configs), *keys, *more], root)


def measure(names, start, sides, measurement, *more):
    """Takes a measurement of versions, one after the other or, if it is of time, in turns. Returns {side: figures}.

    start(side, measurement, *more): starts a process. If one fails, raises Wrong for this version, BadInput for the
    other.
    """
    with contextlib.ExitStack() as stack:
        ask, figures, live = functools.partial(attempt, names), {}, {}
        for side in sides:
            live[side] = stack.enter_context(start(side, measurement, *more))
            figures[side] = ask(side, live[side].answer)
        if measurement != "time":
            return figures
        times = take_turns(live, ask, lambda turn: turn < TURNS)
        return {side: figures_of(ask(side, live[side].end), times[side]) for side in sides}


def attempt(names, side, function, *arguments):
    """Calls a function of the process of a version. Raises as measure() does."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        if side == "this":
            raise Wrong(f"{names[side]} fails: {error}") from None
        hint = "cannot run this config, or is too old for the lab/ of this version"
        raise BadInput(f"{names[side]} {hint}: {error}") from None


def compare(options, config, ask, runs):
    """Returns {side: the figures of all processes}, and the Interval of this version's change of the metric.

    Stops at the first look that shows a significant change, or no change in any round, else after the last round.
    Raises Wrong if the versions do not train the same.
    """
    metric, (numbers, level) = METRICS[options.metric], looks(options.rounds)
    rounds = [{"what": metric.measurement, "round": n} for n in range(1, options.rounds + 1)]

    def take(row):
        number = row.get("round", 1)
        seed = [f"--seed={config.seed + number - 1}"] if options.metric == "loss" else []
        figures = ask(order(number), row["what"], *seed)
        if seed:
            require_comparable(figures, *seed)
        return figures

    def measured():
        return [runs.figures(row) for row in rounds if row in runs]

    def look():
        """The number of rounds that are needed, and the change that they show, or None."""
        changes = [metric.change(**processes) for processes in measured()]
        for number in numbers:
            if number > len(changes):
                return number, None
            some = changes[:number]
            change = intervals({metric: some}, level)[metric] if any(some) else UNCHANGED
            if change.significant or change is UNCHANGED:
                break
        return number, change

    if options.metric != "loss":
        list(runs.take(lambda: [PROFILE], take))
        profiled = runs.figures(PROFILE)
        if wrong := tables.difference(profiled["this"]["losses"], profiled["other"]["losses"]):
            raise Wrong(wrong)
    if options.metric == "memory":
        peaks = {side: profiled[side]["memory"]["peak"] for side in SIDES}
        return {side: [peak] for side, peak in peaks.items()}, change_of_memory(config, **peaks)
    list(runs.take(lambda: rounds[: look()[0]], take, unit="round"))
    return {side: [processes[side][metric.key] for processes in measured()] for side in SIDES}, look()[1]


def change_of_memory(config, other, this):
    """The Interval of the change in bytes: of width 0, as bytes are counted, and 0 for a small change."""
    batch = 2 * 8 * config.batch_size * config.context_length  # bytes of int64 inputs and targets
    if abs(this / other - 1) < max(LEAST, WAITING * batch / other):
        return UNCHANGED
    change = math.log(this / other)
    return Interval(change, change, change)


def table(metric, names, figures, change):
    """The change of a metric as a table of one row. figures: {side: those of all processes}."""
    other, this = (f"{statistics.median(figures[side]) / metric.size:.4g}" for side in SIDES)
    middle, low, high = map(metric.text, change)
    row = {
        names["other"]: other,
        f"this: {names['this']}": this,
        "change": middle,
        f"{LEVEL:.0%} interval": f"{low} to {high}" if change.low < change.high else "counted",
    }
    return tables.texts({metric.heading: row}, tables.plain)


def require_comparable(measured, seed):
    """Raises Wrong or BadInput unless two runs trained on as many tokens and validated on the same."""
    other, this = (measured[side] for side in SIDES)
    if other["val_loss"] is None:
        raise BadInput(f"the other version diverges with {seed}; expected a config that trains")
    if this["val_loss"] is None:
        raise Wrong(f"it diverges with {seed}")
    if this["val_data"] != other["val_data"]:
        raise Wrong("it validates on other data")
    if this["tokens"] != other["tokens"]:
        raise Wrong(f"it trains on {this['tokens']:,} tokens instead of {other['tokens']:,}")


def decide(metric, change):
    """Returns the verdict as a sentence, with its figures."""
    kind, text = "unchanged", f"no change of {metric.heading}"
    if change.significant:
        kind, words = ("worse", metric.worse) if change.middle > 0 else ("better", metric.better)
        middle, *ends = (metric.text(each).lstrip("-") for each in (change.middle, *sorted(change[1:], key=abs)))
        text = f"{words} by {middle}" + f" ({' to '.join(ends)})" * (change.low < change.high)
    elif change is not UNCHANGED:
        text = f"no change larger than {metric.text(max(-change.low, change.high))} can be seen"
    return {"kind": kind, "text": text, **change._asdict()}
