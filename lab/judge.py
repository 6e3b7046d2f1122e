"""Judges a change, gain or noise: python profile.py config/x.py --mode=judge --against=COMMIT (or --patch=FILE)

Two versions run their own code and config, in processes of their own, which one lab/ measures: "this", the working tree
with the patch, if there is one, and "other", the commit or else the tree without the patch (versions.py).

Their first losses must be equal. Then they take turns, in rounds (rounds.py): a process of each, in an order that
alternates. The changes from round to round give an effect and its interval.
"""

import contextlib
import dataclasses
import math
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lab import pictures, tables
from lab.launch import run_alone
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
TOO_OLD = ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError")  # of one version's lab/ with another


class Wrong(Exception):
    """Raised, with the reason, if this version does not do the same as the other."""


class Metric(NamedTuple):
    """A figure of a process, less of which is better, and the words for it.

    size: of the unit in which it is printed. scale, unit: those of its change.
    """

    heading: str
    measurement: str
    key: str
    better: str
    worse: str
    size: float = 1.0
    scale: int = 100
    unit: str = " %"

    def change(self, other, this):
        """The change from one process's figure to another's: a share, or in nats."""
        return this - other if self.unit == " nats" else this / other - 1

    def text(self, change, digits):
        """A change in its unit, with `digits` decimals."""
        return f"{self.scale * change:.{digits}f}{self.unit}"

    def digits(self, margin):
        """Number of decimals that a margin needs to show a digit other than zero."""
        least = 4 if self.scale == 1 else 1
        return max(least, -math.floor(math.log10(self.scale * margin))) if margin else least


METRICS = {
    "speed": Metric("ms/step", "time", "seconds", "faster", "slower", 1e-3),
    "memory": Metric("tensors GB", "examine", "peak", "less memory", "more memory", 1e9),
    "resident": Metric("resident GB", "time", "resident_bytes", "less memory", "more memory", 1e9),
    "loss": Metric("validation loss", "curve", "val_loss", "lower loss", "higher loss", scale=1, unit=" nats"),
}


def judge(options, config_words):
    """Judges, writes judge-METRIC.json and .png, prints a table and, last, the verdict. Returns the exit code."""
    if not (options.against or options.patch):
        raise BadInput("--mode=judge: expected another version, --against=COMMIT, or a change, --patch=FILE")
    config = load_config(config_words)
    if config.dropout and options.metric != "loss":
        raise BadInput(f"dropout={config.dropout}: equal losses cannot be expected; expected --dropout=0")
    paths, given = parse_arguments(config_words)
    paths = [inside(path) for path in paths]
    given["dataset"] = open_dataset(config).folder.resolve()  # of this checkout, for both
    words = [*paths, *(f"--{key}={value}" for key, value in given.items())]
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="judge-") as folder:
        folder = Path(folder).resolve()
        names = check_out(folder, options.against, options.patch, paths)
        return Judgment(folder, names, words, config, options).run()


def inside(path):
    """A path relative to the checkout; absolute if it leads out of it."""
    path = Path(path).resolve()
    return str(path.relative_to(ROOT.resolve()) if path.is_relative_to(ROOT.resolve()) else path)


@contextlib.contextmanager
def ended_by_signals():
    """Turns SIGINT and SIGTERM into SystemExit with their usual codes: what is temporary is removed then too."""

    def end(number, _):
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        print("interrupted; the same command continues", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- measuring


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
        processes = 2 * (self.metric != "loss") + 2 * max(self.looks) * (self.metric != "memory")
        with tqdm(total=processes, unit="process") as self.bar:
            self.bar.update(len(self.results["examined"]) + 2 * len(self.rounds))  # by an interrupted judgment
            try:
                if self.metric != "loss":
                    self.examine()
                if self.metric != "memory":
                    self.race()
                found = verdict(METRICS[self.metric], self.effect(self.metric))
            except Wrong as reason:
                found = {"kind": "wrong", "text": f"WRONG: {reason}"}
        self.results["verdict"] = found
        self.write()
        self.report()
        return EXIT_CODES[found["kind"]]

    def race(self):
        """Takes rounds, up to the look at which there is an effect or nothing has changed, or up to the last one."""
        while len(self.rounds) < max(self.looks):
            self.take_round(len(self.rounds) + 1)
            if len(self.rounds) in self.looks:
                found = self.effect(self.metric)
                if found.seen or not any(found.changes):
                    break

    def ask(self, side, measurement, *words):
        """Takes a measurement of a version. If it fails, raises Wrong for this version, BadInput for the other."""
        try:
            return run_alone(measurement, [*self.words, *words], root=self.roots[side])
        except RuntimeError as error:
            name, reason = self.names[side], str(error).removeprefix("error: ")
        if side == "this":
            raise Wrong(f"{name} fails: {reason}")
        if reason.startswith(TOO_OLD):
            reason = reason.partition(" (/")[0]  # without the path of the copy
            raise BadInput(f"{name} is too old for the lab/ of this version ({reason}); expected a later one")
        raise BadInput(f"{name} cannot run this config: {reason}")

    def measure(self, side, measurement, *words):
        """As ask(), with a step of the progress bar."""
        self.bar.set_postfix_str(f"{self.names[side]}, {measurement}")
        found = self.ask(side, measurement, *words)
        self.bar.update()
        return found

    def examine(self):
        """Measures the memory of both and their first losses. Raises Wrong if the losses differ."""
        found = self.results["examined"]
        for side in SIDES:
            if side not in found:
                found[side] = self.measure(side, "examine")
                self.write()
        if wrong := tables.difference(found["this"]["losses"], found["other"]["losses"]):
            raise Wrong(wrong)

    def take_round(self, number):
        """Measures a process of each version; every second time, this comes first."""
        words = [f"--seed={self.seed + number - 1}"] if self.metric == "loss" else []
        found = {}
        for side in order(number):
            found[side] = self.measure(side, METRICS[self.metric].measurement, *words)
        if self.metric == "loss":
            require_comparable(found, words[0])
        self.rounds.append({side: found[side] for side in SIDES})
        self.write()

    def write(self):
        """Writes the file. Raises BadInput if it cannot be written."""
        write(self.path.parent, {self.path.name: self.results})

    # -- the report

    def values(self, name):
        """{side: a figure of every process so far}; empty if it was not measured, as resident memory on a GPU."""
        metric = METRICS[name]
        if name == "resident" and self.results["machine"]["gpu"]:
            return {}
        if metric.measurement == "examine":
            return {side: [self.results["examined"][side]["memory"][metric.key]] for side in SIDES}
        found = {side: [processes[side].get(metric.key) for processes in self.rounds] for side in SIDES}
        return found if all(value is not None for side in SIDES for value in found[side]) else {}

    def effect(self, name):
        """The Effect on a figure, after as many rounds as there are; of a count, which has no noise, the change."""
        metric, values = METRICS[name], self.values(name)
        if metric.measurement == "examine":
            other, this = (values[side][0] for side in SIDES)
            return Effect.exact(metric.change(other, this), max(LEAST, WAITING * self.batch_bytes / other))
        return effect(metric.change, values, self.looks[len(self.rounds)])

    def report(self):
        """Draws the rounds; prints the table, the files and, last, the verdict."""
        found, written, picture = self.results["verdict"], [self.path], self.path.with_suffix(".png")
        picture.unlink(missing_ok=True)  # of an earlier judgment
        if found["kind"] != "wrong":
            names = {"loss": ["loss"], "memory": ["memory"], "speed": ["speed", "memory", "resident"]}[self.metric]
            measured = [(METRICS[name], self.values(name), self.effect(name)) for name in names if self.values(name)]
            print(tables.texts({metric.heading: row(metric, self.names, *found) for metric, *found in measured}))
            if self.rounds:
                title = pictures.heading("judge", self.results["config"], tables.device(self.results))
                title += f"\n{self.names['this']} against {self.names['other']}: {found['text']}"
                pictures.draw_rounds(self.effect(self.metric), METRICS[self.metric], title, picture)
                written.append(picture)
        print(f"written: {' and '.join(map(str, written))}")
        print(found["text"])


def unfinished(path, conditions):
    """The results in a file if they were measured under the same conditions and have no verdict yet, else None."""
    with contextlib.suppress(BadInput):
        results = resume(path, conditions, {"names": dict, "examined": dict, "rounds": list})
        return None if results and "verdict" in results else results


def require_comparable(found, seed):
    """Raises Wrong or BadInput unless two runs trained on as many tokens and validated on the same."""
    other, this = (found[side] for side in SIDES)
    if other["val_loss"] is None:
        raise BadInput(f"the other version diverges with {seed}; expected a config that trains")
    if this["val_loss"] is None:
        raise Wrong(f"it diverges with {seed}")
    if this["val_data"] != other["val_data"]:
        raise Wrong("it validates on other data")
    if this["tokens"][-1] != other["tokens"][-1]:
        raise Wrong(f"it trains on {this['tokens'][-1]:,} tokens instead of {other['tokens'][-1]:,}")


def row(metric, names, values, found):
    """A row of the table: {heading: text}."""
    other, this = (f"{statistics.median(values[side]) / metric.size:.4g}" for side in SIDES)
    parts, digits = (found.change, found.low, found.high, found.noise), metric.digits(found.margin)
    change, low, high, noise = (metric.text(part, digits) for part in parts)
    counted = not found.equal
    return {
        names["other"]: other,
        f"this: {names['this']}": this,
        "change": change,
        f"{1 - ALPHA:.0%} interval": "counted" if counted else f"{low} to {high}",
        "noise floor": "" if counted else f"± {noise}",
    }


def verdict(metric, found):
    """The verdict in words, with the figures that it rests on."""
    digits = metric.digits(found.margin)
    if found.seen:
        kind, words = ("worse", metric.worse) if found.change > 0 else ("better", metric.better)
        size = metric.text(abs(found.change), digits)
        text = f"{words} by {size}" + f" ± {metric.scale * found.margin:.{digits}f}" * bool(found.margin)
    elif not any(found.changes):
        kind, text = "unchanged", f"no change of {metric.heading}"
    else:
        largest = max(-found.low, found.high)
        kind, text = "unchanged", f"no change larger than {metric.text(largest, digits)} can be seen"
    return {"kind": kind, "text": text, **{name: getattr(found, name) for name in ("change", "low", "high", "noise")}}
