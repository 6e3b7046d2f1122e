"""Tunes a config for this machine: python profile.py config/x.py --mode=tune [--minutes=10]

A search by measurement. It begins with the finished loop, the config as it is, and tries one change after the other.
The first losses must stay the finished loop's. Then the change races against the best config so far: both train in
processes of their own that live at the same time and step in turns, in rounds. A change that falls behind is dropped at
once; one that is seen to be faster (stats.py) is kept. All changes are tried again, from the new best config on, until
none is kept. In the last quarter of the time the best config races against the finished loop; unless it is seen to be
faster, the finished loop wins.

tune.json holds every race. A search that was interrupted begins anew.
"""

import contextlib
import json
import math
import statistics
import textwrap
from pathlib import Path
from time import monotonic

from lab import measure, predict, tables
from lab.launch import Child, TimeUp
from lab.results import commit, default_folder, write
from lab.rows import changed, changes_from, in_words, normal_form
from lab.stats import LEAST, SIDES, intervals, looks, order, times
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.parallel import divide, micro_batch_sizes

LOOKS, LEVEL = looks(12)  # at the rounds of a race, and the level of the interval that they see
LEAST_GAIN = 0.01  # of time; a smaller one is not worth a setting
SEARCHING = 0.75  # share of the time; the rest is for the confirmation


def tune(options, config, conditions):
    """Searches, prints the table and the verdict, writes tune.json and the tuned config, tuned.py.

    config: with its vocab_size. conditions: function that returns those of the results.
    """
    if config.dropout:  # its random numbers depend on the kernels
        raise BadInput(f"dropout={config.dropout}: equal losses cannot be expected; expected --dropout=0")
    start, results = monotonic(), {**conditions(), "commit": commit(), "races": []}
    folder = Path(options.out_dir or default_folder(results))
    write(folder, {"tune.json": results})  # fails now, rather than later, if it cannot be written
    search = Search(config, results, folder)
    try:
        search.run(start + SEARCHING * 60 * options.minutes)
        verdict = search.confirm(start + 60 * options.minutes)
    finally:
        search.end()
    report(search, verdict)


class Search:
    """A search: its races, which are in the results, the best config so far, and the processes that run."""

    def __init__(self, config, results, folder):
        self.config, self.best, self.results, self.folder = config, config, results, folder
        self.races, self.machine, self.losses = results["races"], results["machine"], None
        self.running, self.apart = {}, False  # {config: its process}; apart: one at a time

    def run(self, end):
        """Tries all changes from the best config on, until none is kept or the time is over. Raises BadInput."""
        try:
            self.process(self.config, end)
        except RuntimeError as error:
            raise BadInput(f"the finished loop cannot be measured: {error}") from None
        except TimeUp:
            raise BadInput("the finished loop is not ready by the end of the search; expected more --minutes") from None
        tried, before = {str(normal_form(self.config))}, None  # as texts: two refusals alike are not equal
        with contextlib.suppress(TimeUp):
            while before != self.best:
                before = self.best
                for change in candidates(self.best, self.machine):
                    config = changed(self.best, change)
                    if (form := str(normal_form(config))) not in tried:
                        tried.add(form)
                        kept = self.race(change, config, self.best, end)["outcome"] == "kept"
                        self.best = config if kept else self.best

    def confirm(self, end):
        """Races the best config against the finished loop, which is the best if it is not slower. Returns a verdict."""
        self.end()
        best, self.best = self.best, self.config
        if best == self.config:
            return "no change of the finished loop is seen to be faster"
        try:
            race = self.race(changes_from(best, self.config), best, self.config, end)
        except TimeUp:
            return "no time was left to compare the tuned loop with the finished one"
        if race["outcome"] != "kept":
            return f"the tuned loop is not seen to be faster than the finished one ({race['note'] or speed(race)})"
        self.best = best
        finished, tuned = (milliseconds(race, side) for side in SIDES)
        return f"{speed(race)} as fast as the finished loop, {tuned} ms a step and not {finished}"

    def race(self, change, config, against, end):
        """Races a config against another one, of which it is a change. Raises TimeUp at the end of the time."""
        sides = {"other": against, "this": config}
        name = f"{len(self.races) + 1}. {in_words(change)}"
        race = {"name": name, "change": change, "rounds": [], "outcome": None, "note": None}
        self.races.append(race)
        for other in self.running.keys() - {config, against}:
            self.running.pop(other).end()
        try:
            while race["outcome"] is None:
                turns = order(len(race["rounds"]) + 1)
                race["rounds"].append({side: self.process(sides[side], end).ask(end - monotonic()) for side in turns})
                race["outcome"] = decide(gains_of_time(race))
        except (BadInput, RuntimeError) as error:
            race |= {"outcome": "failed", "note": str(error)}
            if isinstance(error, RuntimeError):
                self.end()  # either may have failed
        finally:
            write(self.folder, {"tune.json": self.results})
        print(f"{name}: {race['note'] or speed(race) + ' as fast, ' + race['outcome']}", flush=True)
        return race

    def process(self, config, end):
        """The process that trains with a config, alone if two do not fit the memory. Raises as start() does."""
        if config not in self.running:
            if self.apart:
                self.end()
            try:
                self.start(config, end)
            except RuntimeError as error:
                if self.apart or not machine.is_out_of_memory(error):
                    raise
                self.apart = True
                self.end()
                try:
                    return self.process(config, end)
                except RuntimeError:
                    self.apart = False  # it does not fit alone either
                    raise
        return self.running[config]

    def start(self, config, end):
        """Starts a process. Raises BadInput if its first losses are not the finished loop's, RuntimeError if it fails.

        A GPU's process says so itself if memory runs out; a CPU's may be killed, and others with it.
        """
        if isinstance(config, BadInput):
            raise config
        if not self.machine["gpu"]:
            peak, free = predict.predict_memory(config).peak, machine.free_memory(machine.choose_device("cpu"))
            if peak > free:
                raise RuntimeError(f"out of memory: {peak / 1e9:.2f} GB predicted, {free / 1e9:.2f} GB free")
        self.running[config] = Child(measure.take_turns, config)
        losses = self.running[config].receive(end - monotonic())
        self.losses = self.losses or losses
        if wrong := tables.difference(losses, self.losses):
            raise BadInput(f"WRONG: {wrong}")

    def end(self):
        """Ends all processes."""
        while self.running:
            self.running.popitem()[1].end()


# -- what is tried


def candidates(config, machine):
    """The changes {key: value} to try, in the order of what they are likely to gain. machine: as of devices.describe().

    None touches the model, the batch of an update, or the optimizer: a step is the same but for its time and memory.
    Some have the config's own values. Micro-batches come half and twice as large as they are.
    """
    on_gpu, rows = bool(machine["gpu"]), config.micro_batch_size or config.batch_size
    sizes = [size for size in micro_batch_sizes(config, divide(config, 1)) if size in (rows // 2, 2 * rows)]
    dtypes = ["bfloat16"] * machine["native_bfloat16"] + ["float16"] * on_gpu + ["float32"]  # others are emulated
    dtype = dtypes[0] if config.dtype == "auto" else config.dtype
    padding = [n for n in (1, 8, 64, 128) if n * math.ceil(config.vocab_size / n) != config.padded_vocab_size]
    values = [
        # On a GPU the formula, which writes the (T, T) matrix to memory, hardly ever wins
        ("attention", ("sdpa", "flash", "cudnn", "matmul") if on_gpu else ("matmul", "sdpa", "blocks")),
        ("compile", (False, True)),
        ("micro_batch_size", sizes),
        ("activation_checkpointing", ("none",)),
        ("dtype", [name for name in dtypes if name != dtype]),
        ("keep_memory", (True, False)),
        ("adamw_impl", ("forloop", "fused") if config.optimizer == "adamw" else ()),
        ("num_workers", [n for n in (0, 1, 2, 4, 8) if n <= max(2, machine["threads"])]),
        ("loss_chunks", (0, 2, 8, 32)),
        ("set_to_none", (True, False)),
        ("lazy_metrics", (True, False)),
        ("matmul_precision", ("highest", "high", "medium")),
        ("pad_vocab_to", padding),
    ]
    pairs = [(key, value) for key, each in values for value in each]
    return [{key: value} for key, value in pairs]


# -- races


def decide(gains):
    """The outcome of a race by its rounds' gains of time: kept, no gain, or None as long as it is open.

    It is over as soon as the median gain is behind, and two rounds are.
    """
    n, middle = len(gains), statistics.median(gains)
    if n in LOOKS and (gain := interval(gains)).low > 0 and gain.middle > LEAST_GAIN:
        return "kept"
    behind = middle < 0 and sum(gain < 0 for gain in gains) > 1
    return "no gain" if behind or n >= max(LOOKS) else None


def interval(gains):
    """The Interval of a race's gain."""
    return intervals({"race": gains}, LEVEL)["race"]


def gains_of_time(race):
    """The logarithm of how many times as fast "this" is, in each round."""
    return [math.log(seconds["other"] / seconds["this"]) for seconds in race["rounds"]]


def speed(race):
    """How many times as fast as the other config, and, of LEAST rounds or more, the interval: 1.10× (1.07–1.18)."""
    gains = gains_of_time(race)
    return times(interval(gains)) if len(gains) >= LEAST else f"{math.exp(statistics.fmean(gains)):.2f}×"


def milliseconds(race, side):
    """The median of a side's rounds."""
    return tables.milliseconds(statistics.median(seconds[side] for seconds in race["rounds"]))


COLUMNS = {  # of the table of races
    "ms/step": lambda race: milliseconds(race, "this"),
    "speed": speed,
    "outcome": lambda race: race["outcome"] or "no time left",
    "best so far": lambda race: milliseconds(race, "other"),
    "rounds": lambda race: str(len(race["rounds"])),
}


def report(search, verdict):
    """Prints the outcome and every race, and writes tuned.py, unless it would change nothing. Raises BadInput."""
    path, words = search.folder / "tuned.py", " ".join(search.results["config"])
    changes = changes_from(search.best, search.config)
    races = [race for race in search.races if race["note"] or race["rounds"]]
    sentence = f"{verdict.capitalize()}: {in_words(changes) or 'the config as it is'}."
    print(tables.on_terminal(sentence, COLUMNS, races))
    print(f"\nwritten: {search.folder}/tune.json, with all rounds")
    if not changes:
        return path.unlink(missing_ok=True)  # of an earlier search
    lines = [
        '"""' + textwrap.fill(f"Tuned for {tables.machine_in_words(search.machine)}: {verdict}.", 115),
        f"\n{len(races) - 1} changes tried; torch {search.machine['torch']}.",
        f"Written by: python profile.py {words} --mode=tune",
        f'To be used: python train.py {words} {path.as_posix()}\n"""\n',
    ]
    for field, value in changes.items():
        kept = [race for race in races[:-1] if race["outcome"] == "kept" and field in race["change"]]
        text = json.dumps(value) if isinstance(value, str) else repr(value)
        lines.append(f"{field} = {text}  # {speed(kept[-1])} the speed of the best before")
    write(search.folder, {path.name: "\n".join(lines)})
    print(f"use: python train.py {words} {path}")
