"""Tunes a config for this machine: python profile.py config/x.py --mode=tune [--minutes=10]

A search by measurement. It begins with the finished loop, the config as it is, and changes one setting
(search_space.py) at a time. The first losses must stay the finished loop's. Then the change races against the best
config so far: both train in processes of their own that live at the same time and step in turns, in rounds (rounds.py).
A change that falls behind is dropped at once; one that is seen to be faster takes the place of the best. Settings that
depend on others are then tried again. In the last quarter of the time the best config races against the finished loop;
unless it is seen to be faster, the finished loop wins.

tune.json holds every race. The same command repeats the search, and reads the outcome of a race that is in the file.
"""

import contextlib
import json
import math
import statistics
import textwrap
from pathlib import Path
from time import monotonic

from lab import launch, measure, plan, predict, tables
from lab.launch import TimeUp
from lab.results import default_folder, resume, write
from lab.rounds import CLEAR, SIDES, bounds, decide, order, plan_looks
from lab.search_space import INTERACTING, directions
from nanoladder import machine
from nanoladder.errors import BadInput

SEARCH, CONFIRMATION = plan_looks(12), plan_looks(24)  # looks at the rounds of a race
FAR = 0.15  # a change of time that is not tried again beside other changes
SEARCHING = 0.75  # share of the time; the rest is for the confirmation
PATIENCE = 0.15  # share of the time within which a process must be ready, unless that is less than
LEAST_PATIENCE = 60  # seconds, in which a GPU's compiler has done all but autotuning


def tune(options, config, conditions):
    """Searches, prints the table and the verdict, writes tune.json and the tuned config, tuned.py.

    config: with its vocab_size. conditions: function that returns those of the results.
    """
    if config.stage:
        raise BadInput(f"stage={config.stage}: --mode=tune begins with the finished loop; expected no --stage")
    if config.dropout:  # its random numbers depend on the kernels
        raise BadInput(f"dropout={config.dropout}: equal losses cannot be expected; expected --dropout=0")
    start, conditions = monotonic(), conditions()
    folder = Path(options.out_dir or default_folder(conditions))
    results = resume(folder / "tune.json", conditions, {"spent": 0.0, "races": [], "confirmations": []})
    search = Search(results, config, folder, options.minutes, start)
    try:
        changes, verdict = search.run()
    finally:
        search.end()
    report(results, changes, verdict, folder)


class Worker(launch.Child):
    """A process that trains with a config, and takes its steps when asked; meanwhile it disturbs nobody.

    losses: of the first steps. Raises RuntimeError with the reason if the process fails, and TimeUp if an answer takes
    longer than `limit` seconds.
    """

    def __init__(self, config, limit):
        super().__init__(measure.take_turns, config)
        self.losses = self.receive(limit)["losses"]

    def turn(self, limit):
        """Seconds of a step, over about a second of steps."""
        return self.ask(limit)["seconds"]


class Search:
    """A search: what was measured (results), the best changes so far, and the processes that run."""

    def __init__(self, results, config, folder, minutes, start):
        self.results, self.config, self.folder, self.machine = results, config, folder, results["machine"]
        self.total, self.start = 60 * minutes, start - results["spent"]
        self.free = None if self.machine["gpu"] else machine.free_memory(machine.choose_device("cpu"))
        self.best, self.running, self.apart = {}, {}, False  # apart: two processes did not fit the memory
        self.costs = {plan.here(config): 0.0}  # {config, in its normal form, or change: the change of time}

    def run(self):
        """Searches and confirms. Returns the changes to write, and the verdict in words."""
        self.measure_finished()
        with contextlib.suppress(TimeUp):
            self.sweep(directions(self.config, self.machine))
            before = None
            while self.best != before:
                before = self.best
                self.sweep(INTERACTING)
        return self.confirm()

    def left(self, share=SEARCHING):
        """Seconds that are left of a share of the time."""
        return share * self.total - (monotonic() - self.start)

    def changed(self, changes):
        """The config with these changes. Raises BadInput if they do not work together."""
        config = plan.changed(self.config, changes)
        if isinstance(config, BadInput):
            raise config
        return config

    def worker(self, changes, share=SEARCHING):
        """The process that trains with these changes. Raises RuntimeError, and TimeUp if it is not ready in time."""
        config, patience = self.changed(changes), max(PATIENCE * self.total, LEAST_PATIENCE)
        if config in self.running:
            return self.running[config]
        if self.apart:
            self.end()
        try:
            self.running[config] = Worker(config, min(self.left(share), patience))
        except RuntimeError as error:
            if not (self.running and machine.is_out_of_memory(error)):
                raise
            self.apart = True
            return self.worker(changes, share)
        return self.running[config]

    def end(self, *changes):
        """Ends the processes that train with these changes, or all."""
        for config in [plan.changed(self.config, each) for each in changes] or list(self.running):
            if config in self.running:
                self.running.pop(config).end()

    def write(self):
        self.results["spent"] = monotonic() - self.start
        write(self.folder, {"tune.json": self.results})

    def measure_finished(self):
        """Measures the losses of the finished loop, unless they are known. Raises BadInput."""
        if "losses" in self.results:
            return
        start = monotonic()
        try:
            losses = self.worker({}).losses
        except RuntimeError as error:
            raise BadInput(f"the finished loop cannot be measured: {error}") from None
        except TimeUp:
            losses = None
        if not losses or self.left() < monotonic() - start:  # not even one race
            raise BadInput(
                f"minutes={self.total / 60:g}: the first steps of the finished loop take {monotonic() - start:.0f} s; "
                "expected more minutes, or a smaller model or batch_size"
            )
        self.results["losses"] = losses
        self.write()

    def sweep(self, settings):
        """Tries the values of some settings, from the best config so far. Raises TimeUp."""
        for setting in settings:
            for direction in directions(self.changed(self.best), self.machine)[setting]:
                for change in direction:
                    if self.challenge(change) > CLEAR:
                        break

    def challenge(self, change):
        """Races the best config with a change against the best. Returns the change of time; infinite if it failed."""
        key, changes = json.dumps(change), {**self.best, **change}
        changes = {field: value for field, value in changes.items() if value != getattr(self.config, field)}
        form = plan.here(plan.changed(self.config, changes))
        if form in self.costs or self.costs.get(key, 0.0) > FAR:
            return self.costs.get(form, self.costs.get(key))
        race = find(self.results["races"], changes, self.best, change)
        if race["outcome"] is None:
            self.race(race)
        self.costs[key] = self.costs[form] = cost(race)
        kept = race["outcome"] == "kept"
        self.end(self.best if kept else changes)
        self.best = changes if kept else self.best
        return self.costs[key]

    def race(self, race):
        """Takes a race's rounds until there is an outcome. Raises TimeUp if the time of the search is over."""
        if self.left() <= 0:
            raise TimeUp
        if race not in self.results["races"]:
            self.results["races"].append(race)
        start = monotonic()
        try:
            self.require_memory(race)
            losses = [self.worker(race[side]).losses for side in ("against", "changes")]
            if wrong := tables.difference(losses[1], self.results["losses"]):
                raise BadInput(f"WRONG: {wrong}")
            self.take_rounds(race, SEARCH, SEARCHING, drops=True)
        except TimeUp:
            if self.left() < 1:
                raise
            race |= {"outcome": "failed", "note": f"not ready after {monotonic() - start:.0f} s"}
        except (BadInput, RuntimeError) as error:
            race |= {"outcome": "failed", "note": str(error)}
            if isinstance(error, RuntimeError):
                self.end()  # either may have failed
        self.write()
        print(f"{self.results['spent'] / 60:5.1f} min  {name(race)}: {outcome(race)}", flush=True)

    def require_memory(self, race):
        """Raises BadInput for a config that is too large for a CPU. Decides if two processes fit at a time.

        A GPU's process says so itself if memory runs out; a CPU's may be killed, and others with it.
        """
        if self.free is not None:
            this, other = (predict.predict_memory(self.changed(race[side])).peak for side in ("changes", "against"))
            if this > self.free:
                raise BadInput(f"{this / 1e9:.2f} GB predicted, of {self.free / 1e9:.2f} GB")
            self.apart = self.apart or this + other > 0.8 * self.free

    def take_rounds(self, race, looks, share, drops=False):
        """Adds rounds until there is an outcome (decide). Raises TimeUp if the share of the time is over."""
        sides = {"other": race["against"], "this": race["changes"]}
        while race["outcome"] is None:
            seconds = {}
            for side in order(len(race["rounds"]) + 1):
                seconds[side] = self.worker(sides[side], share).turn(self.left(share))
            race["rounds"].append({side: seconds[side] for side in SIDES})
            race["outcome"] = decide(changes_of_time(race), looks, drops)
            self.write()

    def confirm(self):
        """Races the best config against the finished loop. Returns the changes to write, and the verdict in words."""
        self.end()
        if not self.best:
            return {}, "no change of the finished loop is seen to be faster"
        race = find(self.results["confirmations"], self.best, {})
        if race not in self.results["confirmations"]:
            self.results["confirmations"].append(race)
        print("the tuned loop beside the finished one", flush=True)
        with contextlib.suppress(RuntimeError, TimeUp):
            self.take_rounds(race, CONFIRMATION, 1.0)
        self.write()
        if not race["outcome"]:
            return {}, "no time was left to compare the tuned loop with the finished one (more --minutes continue)"
        times = speed(race, CONFIRMATION)
        if race["outcome"] != "kept":
            return {}, f"the tuned loop is not seen to be faster than the finished one ({times})"
        finished, ours = (milliseconds(race, side) for side in SIDES)
        return self.best, f"{times} as fast as the finished loop, {ours} ms a step and not {finished}"


# -- races: {change, changes and against of the finished config, outcome, note, rounds}


def find(races, changes, against, change=None):
    """The race of these two configs, each as changes of the finished one, if it has begun; else a new one."""
    for race in races:
        if (race["changes"], race["against"]) == (changes, against):
            return race
    return {"change": change, "changes": changes, "against": against, "outcome": None, "note": None, "rounds": []}


def changes_of_time(race):
    """The change of time in each round, as a share."""
    return [seconds["this"] / seconds["other"] - 1 for seconds in race["rounds"]]


def cost(race):
    """The change of time that a race has shown, the median of its rounds."""
    return math.inf if race["outcome"] == "failed" else statistics.median(changes_of_time(race))


def name(race):
    """The change in words, without the compile=True that comes with a scope or a mode of the compiler."""
    change = race["change"]
    return plan.in_words({field: change[field] for field in change if field != "compile" or len(change) == 1})


def speed(race, looks=SEARCH):
    """The speed beside the other config and its interval over the rounds, such as 1.10× (1.07–1.18)."""
    changes = changes_of_time(race)
    low, high = bounds(changes, looks.get(len(changes), 1))
    return f"{1 / (1 + statistics.median(changes)):.2f}× ({1 / (1 + high):.2f}–{1 / (1 + low):.2f})"


def outcome(race):
    """The outcome of a race in words."""
    return race["note"] or f"{speed(race)} as fast, {race['outcome']}"


def milliseconds(race, side):
    """The median of a side's rounds."""
    return tables.milliseconds(statistics.median(seconds[side] for seconds in race["rounds"]))


# -- the files


COLUMNS = {  # of the table of races
    "ms/step": lambda row: milliseconds(row["race"], "this"),
    "speed": lambda row: speed(row["race"]),
    "outcome": lambda row: row["race"]["outcome"] or "no time left",
    "best so far": lambda row: milliseconds(row["race"], "other"),
    "rounds": lambda row: str(len(row["race"]["rounds"])),
}


def report(results, changes, verdict, folder):
    """Prints the outcome and every race, and writes tuned.py, unless it would change nothing. Raises BadInput."""
    path = folder / "tuned.py"
    races = [race for race in results["races"] if race["note"] or race["rounds"]]
    rows = [{"name": f"{n}. {name(race)}", "note": race["note"]} for n, race in enumerate(races, 1)]
    rows = [row if row["note"] else row | {"race": race} for row, race in zip(rows, races, strict=True)]
    sentence = f"{verdict.capitalize()}: {plan.in_words(changes) or 'the config as it is'}."
    words = " ".join(results["config"])
    print(tables.on_terminal(sentence, COLUMNS, rows))
    print(f"\nwritten: {folder}/tune.json, with all rounds")
    if not changes:
        return path.unlink(missing_ok=True)  # of an earlier search
    lines = [
        '"""' + textwrap.fill(f"Tuned for {tables.machine_in_words(results['machine'])}: {verdict}.", 115),
        f"\n{len(rows)} changes tried in {results['spent'] / 60:.1f} minutes, torch {results['machine']['torch']}.",
        f"Written by: python profile.py {words} --mode=tune",
        f'To be used: python train.py {words} {path.as_posix()}\n"""\n',
    ]
    for field, value in changes.items():
        kept = [race for race in races if race["outcome"] == "kept" and field in race["change"]]
        text = json.dumps(value) if isinstance(value, str) else repr(value)
        lines.append(f"{field} = {text}  # {speed(kept[-1])} the speed of the best before")
    write(folder, {path.name: "\n".join(lines)})
    print(f"use: python train.py {words} {path}")
