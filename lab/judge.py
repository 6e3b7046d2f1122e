"""Judges a change, gain or noise: python profile.py config/x.py --mode=judge --against=COMMIT

Two versions run their own code and config, in processes of their own, which one lab/ measures: "this", the working
tree, and "other", the commit (versions.py).

Their first losses must be equal. Then they take turns, in rounds (rounds.py): a process of each, in an order that
alternates. The changes from round to round give an effect and its interval.
"""

import contextlib
import dataclasses
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lab import tables
from lab.launch import run_command
from lab.results import ROOT, code_hash, default_folder, resume, write
from lab.rounds import ALPHA, SIDES, Effect, effect, order, plan_looks
from lab.versions import check_out
from nanoladder.config import parse_arguments
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.run import load_config

LEAST = 5e-4  # share of the memory; a smaller change is none
WAITING = 4  # batches: as much memory as these is there or not, as the loader's workers happen to be ahead
EXIT_CODES = {"better": 0, "unchanged": 0, "worse": 1, "wrong": 1}


class Wrong(Exception):
    """Raised, with the reason, if this version does not do the same as the other."""


class Metric(NamedTuple):
    """A figure of a process, less of which is better, and the words for it. size: of the unit in which it is printed.

    A change is a share, or with nats=True a difference.
    """

    heading: str
    measurement: str
    key: str
    better: str
    worse: str
    size: float = 1.0
    nats: bool = False

    def change(self, other, this):
        """The change from one process's figure to another's."""
        return this - other if self.nats else this / other - 1

    def text(self, change):
        """A change in its unit."""
        return f"{change:.4f} nats" if self.nats else f"{100 * change:.2f} %"


METRICS = {
    "speed": Metric("ms/step", "time", "seconds", "faster", "slower", 1e-3),
    "memory": Metric("tensors GB", "examine", "peak", "less memory", "more memory", 1e9),
    "loss": Metric("validation loss", "curve", "val_loss", "lower loss", "higher loss", nats=True),
}


def judge(options, config_words):
    """Judges, writes judge-METRIC.json, prints a table and, last, the verdict. Returns the exit code."""
    if not options.against:
        raise BadInput("--mode=judge: expected another version, --against=COMMIT")
    config = load_config(config_words)
    if config.dropout and options.metric != "loss":
        raise BadInput(f"dropout={config.dropout}: equal losses cannot be expected; expected --dropout=0")
    paths, given = parse_arguments(config_words)
    paths = [inside(path) for path in paths]
    given["dataset"] = open_dataset(config).folder.resolve()  # of this checkout, for both
    words = [*paths, *(f"--{key}={value}" for key, value in given.items())]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the copies, as Ctrl-C does
    with tempfile.TemporaryDirectory(prefix="judge-") as folder:
        folder = Path(folder).resolve()
        names = check_out(folder, options.against, paths)
        return Judgment(folder, names, words, config, options).run()


def inside(path):
    """A path relative to the checkout; absolute if it leads out of it."""
    path = Path(path).resolve()
    return str(path.relative_to(ROOT.resolve()) if path.is_relative_to(ROOT.resolve()) else path)


class Judgment:
    """Two versions side by side, and what was measured of them, written to a file after every round."""

    def __init__(self, folder, names, words, config, options):
        self.roots = {side: folder / side for side in SIDES}
        self.names, self.words, self.seed, self.metric = names, words, config.seed, options.metric
        self.looks = plan_looks(options.rounds)
        self.batch_bytes = 2 * 8 * config.batch_size * config.context_length  # int64 inputs and targets
        conditions = {
            "metric": self.metric,
            "most_rounds": options.rounds,
            "machine": self.ask("other", "machine"),
            "config": [word for word in words if not word.startswith("--dataset=")],
            "keys": dataclasses.asdict(config),
            "data": open_dataset(config).fingerprint(),
            "code": {side: code_hash(self.roots[side], "config/**/*.py") for side in SIDES},
        }
        self.path = Path(options.out_dir or default_folder(conditions), f"judge-{self.metric}.json")
        self.results = unfinished(self.path, conditions) or {**conditions, "names": names, "examined": {}, "rounds": []}
        self.rounds = self.results["rounds"]

    def run(self):
        """Measures until there is a verdict, and reports it. Returns its exit code."""
        self.write()
        try:
            if self.metric != "loss":
                self.examine()
            if self.metric != "memory":
                self.race()
            verdict = decide(METRICS[self.metric], self.effect(self.metric))
        except Wrong as reason:
            verdict = {"kind": "wrong", "text": f"WRONG: {reason}"}
        self.results["verdict"] = verdict
        self.write()
        if verdict["kind"] != "wrong":
            names = ["speed", "memory"] if self.metric == "speed" else [self.metric]
            print(tables.texts({METRICS[name].heading: self.row(name) for name in names}))
        print(f"written: {self.path}\n{verdict['text']}")
        return EXIT_CODES[verdict["kind"]]

    def examine(self):
        """Measures the memory of both and their first losses. Raises Wrong if the losses differ."""
        examined = self.results["examined"]
        for side in SIDES:
            if side not in examined:
                examined[side] = self.ask(side, "examine")
                self.write()
        if wrong := tables.difference(examined["this"]["losses"], examined["other"]["losses"]):
            raise Wrong(wrong)

    def race(self):
        """Takes rounds, up to the look at which there is an effect or nothing has changed, or up to the last one."""
        done, most = len(self.rounds), max(self.looks)
        for number in tqdm(range(done + 1, most + 1), initial=done, total=most, unit="round"):
            self.take_round(number)
            if number in self.looks:
                effect = self.effect(self.metric)
                if effect.seen or not any(effect.changes):
                    break

    def take_round(self, number):
        """Measures a process of each version; every second time, this comes first."""
        words = [f"--seed={self.seed + number - 1}"] if self.metric == "loss" else []
        measured = {side: self.ask(side, METRICS[self.metric].measurement, *words) for side in order(number)}
        if self.metric == "loss":
            require_comparable(measured, words[0])
        self.rounds.append({side: measured[side] for side in SIDES})
        self.write()

    def ask(self, side, measurement, *words):
        """Takes a measurement of a version. If it fails, raises Wrong for this version, BadInput for the other."""
        try:
            return run_command(measurement, [*self.words, *words], root=self.roots[side])
        except RuntimeError as error:
            name, reason = self.names[side], str(error)
        if side == "this":
            raise Wrong(f"{name} fails: {reason}")
        raise BadInput(f"{name} cannot run this config, or is too old for the lab/ of this version: {reason}")

    def write(self):
        """Writes the file. Raises BadInput if it cannot be written."""
        write(self.path.parent, {self.path.name: self.results})

    def values(self, name):
        """{side: a figure of every process so far}"""
        metric = METRICS[name]
        if name == "memory":
            return {side: [self.results["examined"][side]["memory"][metric.key]] for side in SIDES}
        return {side: [processes[side][metric.key] for processes in self.rounds] for side in SIDES}

    def effect(self, name):
        """The Effect on a figure, after as many rounds as there are; of a count, which has no noise, the change."""
        metric, values = METRICS[name], self.values(name)
        if name == "memory":
            other, this = (values[side][0] for side in SIDES)
            return Effect.exact(metric.change(other, this), max(LEAST, WAITING * self.batch_bytes / other))
        return effect(metric.change, values, self.looks[len(self.rounds)])

    def row(self, name):
        """A row of the table: {heading: text}."""
        metric, values, effect = METRICS[name], self.values(name), self.effect(name)
        other, this = (f"{statistics.median(values[side]) / metric.size:.4g}" for side in SIDES)
        change, low, high, noise = map(metric.text, (effect.change, effect.low, effect.high, effect.noise))
        counted = not effect.equal
        return {
            self.names["other"]: other,
            f"this: {self.names['this']}": this,
            "change": change,
            f"{1 - ALPHA:.0%} interval": "counted" if counted else f"{low} to {high}",
            "noise floor": "" if counted else f"± {noise}",
        }


def unfinished(path, conditions):
    """The results in a file if they were measured under the same conditions and have no verdict yet, else None."""
    with contextlib.suppress(BadInput):
        results = resume(path, conditions, {"names": dict, "examined": dict, "rounds": list})
        return None if results and "verdict" in results else results


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


def decide(metric, effect):
    """The verdict in words, with the figures that it rests on."""
    if effect.seen:
        kind, words = ("worse", metric.worse) if effect.change > 0 else ("better", metric.better)
        margin = f" ± {metric.text(effect.margin)}" if effect.margin else ""
        text = f"{words} by {metric.text(abs(effect.change))}{margin}"
    elif not any(effect.changes):
        kind, text = "unchanged", f"no change of {metric.heading}"
    else:
        largest = max(-effect.low, effect.high)
        kind, text = "unchanged", f"no change larger than {metric.text(largest)} can be seen"
    return {"kind": kind, "text": text, **{key: getattr(effect, key) for key in ("change", "low", "high", "noise")}}
