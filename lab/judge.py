"""Judges a change, gain or noise: python profile.py config/x.py --mode=judge --against=COMMIT

Two versions run their own code and config, in processes of their own, which one lab/ measures: "this", the working
tree, and "other", the commit. Both are copied to a temporary folder; the checkout and git's index are only read.

Their first losses must be equal. Then they take turns, in rounds (rounds.py): a process of each, in an order that
alternates. The changes from round to round give an effect and its interval.
"""

import contextlib
import functools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lab import tables
from lab.launch import run_command
from lab.results import ROOT, code_hash, default_folder, resume, write
from lab.rounds import ALPHA, SIDES, Effect, effect, order, plan_looks
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
    "memory": Metric("tensors GB", "profile", "peak", "less memory", "more memory", 1e9),
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
        ask = functools.partial(measure, folder, names, words)
        code = {side: code_hash(folder / side, ["**/*.py"]) for side in SIDES}
        conditions = {"names": names, "code": code, "machine": ask("other", "machine"), "config": words}
        path = Path(options.out_dir or default_folder(conditions), f"judge-{options.metric}.json")
        results, save = begun(path, conditions), lambda: write(path.parent, {path.name: results})
        save()  # in case that it cannot be written
        effects = {}
        try:
            effects = compare(options, config, ask, results, save)
            verdict = decide(METRICS[options.metric], effects[options.metric])
        except Wrong as reason:
            verdict = {"kind": "wrong", "text": f"WRONG: {reason}"}
    write(path.parent, {path.name: results | {"verdict": verdict}})
    if effects:
        print(tables.texts({METRICS[name].heading: row(name, results, effects[name]) for name in effects}))
    print(f"written: {path}\n{verdict['text']}")
    return EXIT_CODES[verdict["kind"]]


def begun(path, conditions):
    """The results of an interrupted judgment of the same versions, which goes on, or new ones."""
    new = {"profiled": {}, "rounds": []}
    with contextlib.suppress(BadInput):
        if "verdict" not in (results := resume(path, conditions, new)):
            return results
    return {**conditions, **new}


def inside(path):
    """A path relative to the checkout; absolute if it leads out of it."""
    path = Path(path).resolve()
    return str(path.relative_to(ROOT.resolve()) if path.is_relative_to(ROOT.resolve()) else path)


def check_out(folder, against, paths):
    """Fills folder/this and folder/other, and returns {side: its name}. Raises BadInput.

    this: the working tree as it stands, with new Python files. other: the commit `against`, with the lab/ of this.
    paths: config files inside the checkout; other gets those that it lacks.
    """
    this, other = folder / "this", folder / "other"
    head, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", "*.py")
    archive = folder / "other.zip"
    folder.mkdir(parents=True, exist_ok=True)
    git("archive", f"--output={archive}", against, failed=f"--against={against}: expected a commit or branch")
    shutil.unpack_archive(archive, other)
    listed = git("ls-files"), git("ls-files", "--others", "--exclude-standard", "--", "*.py")
    names = [name for name in "\n".join(listed).splitlines() if (ROOT / name).is_file()]  # not deleted
    for version, copied in ((this, names), (other, [name for name in names if name.startswith("lab/")])):
        for name in [*copied, *(path for path in paths if not (version / path).exists())]:
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, version / name)
    return {"other": against, "this": f"{head} + changes" if changed else head}


def git(*words, failed="--mode=judge takes two versions of a git checkout"):
    """The output of a git command in this repository. Raises BadInput with the reason if it fails."""
    settings = {"GIT_CEILING_DIRECTORIES": str(ROOT.parent), "GIT_OPTIONAL_LOCKS": "0"}  # no other checkout; reads
    command = ["git", "-C", str(ROOT), "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    except OSError as error:
        raise BadInput(f"--mode=judge needs git, which cannot be run ({error.strerror}); install it") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise BadInput(f"{failed} ({reason})")
    return done.stdout.strip()


def measure(folder, names, words, side, measurement, *more):
    """Takes a measurement of a version. If it fails, raises Wrong for this version, BadInput for the other."""
    try:
        return run_command(measurement, [*words, *more], root=folder / side)
    except RuntimeError as error:
        reason = str(error)
    if side == "this":
        raise Wrong(f"{names[side]} fails: {reason}")
    raise BadInput(f"{names[side]} cannot run this config, or is too old for the lab/ of this version: {reason}")


def compare(options, config, ask, results, save):
    """{metric: Effect} on what decides and, if that is the speed, on the memory. Adds what it measures to the results.

    save: writes them, after each round.
    Takes rounds up to the look at which there is an effect or nothing has changed, or up to the last one. Raises Wrong
    if the versions do not train the same.
    """
    effects, metric, looks = {}, METRICS[options.metric], plan_looks(options.rounds)
    if options.metric != "loss":
        profiled = results["profiled"] = results["profiled"] or {side: ask(side, "profile") for side in SIDES}
        if wrong := tables.difference(profiled["this"]["losses"], profiled["other"]["losses"]):
            raise Wrong(wrong)
        effects["memory"] = effect_on_memory(config, *(profiled[side]["memory"]["peak"] for side in SIDES))
    if options.metric == "memory":
        return effects
    for number in tqdm(range(1, max(looks) + 1), unit="round"):
        if number > len(results["rounds"]):
            seed = [f"--seed={config.seed + number - 1}"] if options.metric == "loss" else []
            measured = {side: ask(side, metric.measurement, *seed) for side in order(number)}
            if seed:
                require_comparable(measured, *seed)
            results["rounds"].append(measured)
            save()
        if number in looks:
            found = effect(metric.change, values(options.metric, results), looks[number])
            if found.seen or not any(found.changes):
                break
    return {options.metric: found, **effects}


def effect_on_memory(config, other, this):
    """The Effect on bytes, which are counted and have no noise: the change, if it is one."""
    batch = 2 * 8 * config.batch_size * config.context_length  # bytes of int64 inputs and targets
    return Effect.exact(this / other - 1, max(LEAST, WAITING * batch / other))


def values(name, results):
    """{side: a figure of every process}"""
    key = METRICS[name].key
    if name == "memory":
        return {side: [results["profiled"][side]["memory"][key]] for side in SIDES}
    return {side: [processes[side][key] for processes in results["rounds"]] for side in SIDES}


def row(name, results, effect):
    """A row of the table: {heading: text}."""
    metric, measured, names = METRICS[name], values(name, results), results["names"]
    other, this = (f"{statistics.median(measured[side]) / metric.size:.4g}" for side in SIDES)
    change, low, high, noise = map(metric.text, (effect.change, effect.low, effect.high, effect.noise))
    counted = not effect.equal
    return {
        names["other"]: other,
        f"this: {names['this']}": this,
        "change": change,
        f"{1 - ALPHA:.0%} interval": "counted" if counted else f"{low} to {high}",
        "noise floor": "" if counted else f"± {noise}",
    }


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
