"""Tunes a config for this machine: python profile.py config/x.py --mode=tune [--memory_gb=GB] [--minutes=10]

A search by measurement. It begins with the finished loop, the config as it is, and changes one knob (knobs.py) at a
time. The first losses must stay the finished loop's. Then the change races against the best config so far: both train
in processes of their own (turns.py) and step in turns, in rounds (rounds.py). A change that falls behind is dropped at
once; one that is seen to be faster takes the place of the best. Knobs that depend on others are then tried again. At
the end the best config races against the finished loop; unless it is seen to be faster, the finished loop wins.

tune.json holds every race. The same command repeats the search, and reads the outcome of a race that is in the file.
"""

import contextlib
import json
import math
import statistics
from pathlib import Path
from time import monotonic

from tqdm import tqdm

from lab import knobs, predict, tables, tuned
from lab.knobs import KNOBS, Machine
from lab.measure import WINDOW
from lab.results import default_folder, write
from lab.rounds import CLEAR, SIDES, decide, order
from lab.tuned import CONFIRMATION, SEARCH
from lab.turns import Ring, TimeUp
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.run import load_config

CODE = [f"lab/{name}.py" for name in ("tune", "knobs", "rounds", "turns", "launch")]  # races depend on it
HOPELESS = 0.3  # a change of time that needs no rounds if the first steps show it
SHORT = 0.1  # seconds; the first of steps that take less show nothing
FAR = 0.15  # a change of time that is not tried again beside other changes
LEAST_ROUNDS = 3  # that there must be time for when a race starts
PATIENCE = 0.15  # share of the whole time within which a process must be ready, unless that is less than
LEAST_PATIENCE = 60  # seconds, in which a GPU's compiler has done all but autotuning


def tune(options, words, conditions):
    """Searches, prints the table and the verdict, writes tune.json, tune.md, tune.png and the tuned config.

    words: the config's, with its vocab_size. conditions: function that returns those of the results.
    """
    start, config = monotonic(), load_config(words)
    if config.stage:
        raise BadInput(f"stage={config.stage}: --mode=tune begins with the finished loop; expected no --stage")
    conditions = {**conditions(), "config": options.given, "memory_gb": options.memory_gb}
    folder = Path(options.out_dir or default_folder(conditions))
    search = Search(tuned.open_results(folder, conditions), words, config, folder, options, start)
    try:
        verdict = search.run()
    finally:
        search.ring.end()
    tuned.report(search.results, verdict, search.untried, folder, options.tuned_dir)


class Unfit(Exception):
    """A change that needs no rounds: it does not fit the memory, or its losses are wrong."""


class Search:
    """A search: what was measured (results), the best changes so far, and the processes that run (ring)."""

    def __init__(self, results, words, config, folder, options, start):
        self.results, self.words, self.config, self.folder = results, words, config, folder
        self.total, self.start = 60 * options.minutes, start - results["spent"]
        on = results["machine"]
        self.free = None if on["gpu"] else machine.free_memory(machine.choose_device("cpu"))
        memory = options.memory_gb and 1e9 * options.memory_gb
        self.machine = Machine(bool(on["gpu"]), on["native_bfloat16"], on["threads"], memory)
        self.first = self.best = self.reduced(knobs.fitting(config, self.machine))
        self.ring, self.costs, self.tried, self.untried = Ring(), {}, {}, []

    def run(self):
        """Searches and confirms. Returns the verdict."""
        bar_format = "{l_bar}{bar}| {n_fmt} of {total_fmt} s{postfix}"
        with tqdm(total=round(self.total), bar_format=bar_format, disable=None) as self.bar:
            self.measure_finished()
            self.tried[self.normal(self.first)] = 0.0
            self.sweep(KNOBS)
            before = None
            while self.best != before:
                before = self.best
                self.sweep([knob for knob in KNOBS if knob.interacts])
            return tuned.verdict(self.first, self.best, self.confirm())

    # -- time and configs

    def left(self):
        """Seconds that are left of the search."""
        return self.total - (monotonic() - self.start)

    def turn_seconds(self):
        """Seconds of a turn: as many whole steps as last for WINDOW."""
        seconds = self.results["seconds"]
        return 1.2 * seconds * math.ceil(WINDOW / seconds)

    def round_seconds(self):
        return 2 * (self.turn_seconds() + (self.start_seconds() if self.ring.apart else 0.0))

    def start_seconds(self):
        return statistics.median(self.ring.starts or [self.results["start_seconds"]])

    def reserve(self):
        """Seconds that the confirmation takes, up to its first look."""
        return 2 * self.start_seconds() + min(CONFIRMATION) * self.round_seconds()

    def race_seconds(self):
        """Seconds that a race needs to be worth its start."""
        return self.start_seconds() + LEAST_ROUNDS * self.round_seconds()

    def reduced(self, changes):
        """The changes without those that leave the config's values."""
        return {field: value for field, value in changes.items() if value != getattr(self.config, field)}

    def words_of(self, changes):
        return [*self.words, *(f"--{field}={value}" for field, value in changes.items())]

    def load(self, changes):
        return load_config(self.words_of(changes))

    def normal(self, changes):
        return knobs.normal(self.load(changes), self.machine)

    def patience(self):
        """Seconds to wait for a process during the search."""
        return min(self.left() - self.reserve(), max(PATIENCE * self.total, LEAST_PATIENCE))

    def contender(self, changes, limit, *words):
        """The process that trains with these changes. Raises RuntimeError, and TimeUp after `limit` seconds."""
        return self.ring.contender([*self.words_of(changes), *words], limit)

    def losses(self, changes, limit):
        """The first losses with these changes: without dropout, whose random numbers depend on the kernels."""
        if not self.config.dropout:
            return self.contender(changes, limit).losses
        losses = self.contender(changes, limit, "--dropout=0").losses
        self.ring.end([*self.words_of(changes), "--dropout=0"])
        return losses

    def write(self, doing=None):
        """Writes tune.json and shows the time."""
        self.results["spent"] = monotonic() - self.start
        self.bar.update(round(min(self.results["spent"], self.total)) - self.bar.n)
        if doing:
            self.bar.set_postfix_str(doing)
        write(self.folder, {"tune.json": self.results})

    # -- the search

    def measure_finished(self):
        """Measures losses and time of the finished loop, unless they are known. Raises BadInput."""
        if "losses" not in self.results:
            self.write("the finished loop")
            start = monotonic()
            try:
                self.results["seconds"] = self.contender(self.first, self.left()).seconds
                self.results["losses"] = self.losses(self.first, self.left())
            except RuntimeError as error:
                raise BadInput(f"the finished loop cannot be measured: {error}") from None
            except TimeUp:
                raise BadInput(
                    f"minutes={self.total / 60:g}: the first steps of the finished loop take longer than "
                    f"{monotonic() - start:.0f} s; expected more minutes, or a smaller model or batch_size"
                ) from None
            self.results["start_seconds"] = monotonic() - start
            self.write()
        needed = self.race_seconds() + self.reserve()
        if not self.results["races"] and self.left() < needed:
            raise BadInput(
                f"minutes={self.total / 60:g}: a step of the finished loop takes {self.results['seconds']:.2g} s, and "
                f"a process {self.start_seconds():.0f} s to start; expected at least "
                f"--minutes={math.ceil((self.total - self.left() + 2 * needed) / 60)}"
            )

    def sweep(self, some):
        """Tries the ways of some knobs, from the best config so far."""
        for knob in some:
            for way in knob.ways(self.load(self.best), self.machine):
                for change in way:
                    if self.challenge(change) > CLEAR:
                        break

    def challenge(self, change):
        """Races the best config with a change against the best. Returns the change of time; infinite if it failed."""
        key, changes = json.dumps(change), self.reduced({**self.best, **change})
        form = json.dumps(changes, sort_keys=True)
        with contextlib.suppress(BadInput):
            form = self.normal(changes)
        if form in self.tried or self.costs.get(key, 0.0) > FAR:
            return self.tried.get(form, self.costs.get(key))
        race = tuned.find(self.results["races"], changes, self.best)
        if race["outcome"] is None:
            race["change"] = change
            self.race(race)
        self.costs[key] = self.tried[form] = tuned.cost(race)
        loser = self.best if race["outcome"] == "kept" else changes
        self.ring.end(self.words_of(loser))
        self.best = changes if race["outcome"] == "kept" else self.best
        return self.costs[key]

    def race(self, race):
        """Takes a race's rounds until there is an outcome, or no time."""
        name = tuned.name(race)
        if self.left() < self.race_seconds() + self.reserve():
            self.untried.append(name)
            return
        race.setdefault("minute", (monotonic() - self.start) / 60)
        if race not in self.results["races"]:
            self.results["races"].append(race)
        self.write(name)
        start = monotonic()
        try:
            self.require_memory(race)
            other = self.contender(race["against"], self.patience())
            self.require_losses(race)
            this = self.contender(race["changes"], self.patience())
            race["first"] = this.seconds / other.seconds - 1
            if race["first"] > HOPELESS and this.seconds > SHORT:
                race["outcome"] = "slower"
            self.take_rounds(race, SEARCH, self.reserve(), drops=True)
        except TimeUp:
            if self.left() > self.race_seconds() + self.reserve():
                race |= {"outcome": "failed", "note": f"not ready after {monotonic() - start:.0f} s"}
            else:
                self.untried.append(name)
        except (BadInput, Unfit) as error:
            race |= {"outcome": "failed", "note": str(error)}
        except RuntimeError as error:
            race |= {"outcome": "failed", "note": str(error)}
            self.ring.end()  # either may have failed
        self.write()
        self.bar.write(f"{self.results['spent'] / 60:5.1f} min  {name}: {tuned.outcome(race)}")

    def require_memory(self, race):
        """Raises BadInput for a refused config, Unfit for one too large. Decides if two processes fit at a time."""
        configs = [self.load(changes) for changes in (race["changes"], race["against"])]
        peaks, most = [], self.machine.memory or self.free
        if not most:  # a process on a GPU says so itself if memory runs out, and a prediction takes seconds
            return
        for config in configs:
            with contextlib.suppress(BadInput):  # not predictable
                peaks.append(predict.predict_memory(config, self.machine.device_type).peak)
        if len(peaks) < 2:
            return
        race["predicted"] = peaks[0]
        if peaks[0] > most:
            raise Unfit(f"{peaks[0] / 1e9:.2f} GB predicted, of {most / 1e9:.2f} GB")
        self.ring.apart = self.ring.apart or bool(self.free and sum(peaks) > 0.8 * self.free)

    def require_losses(self, race):
        """Raises Unfit unless the first losses are the finished loop's."""
        race["losses"] = self.losses(race["changes"], self.patience())
        if wrong := tables.difference(race["losses"], self.results["losses"]):
            raise Unfit(f"WRONG: {wrong}")

    def take_rounds(self, race, looks, reserve=0.0, drops=False):
        """Adds rounds until there is an outcome (decide) or only the reserve of time is left."""
        sides = {"other": race["against"], "this": race["changes"]}
        while race["outcome"] is None and self.left() - reserve > self.round_seconds():
            found = {}
            for side in order(len(race["rounds"]) + 1):
                found[side] = self.contender(sides[side], self.left() - reserve).turn(self.left() - reserve)
            race["rounds"].append({side: found[side] for side in SIDES})
            race["outcome"] = decide(tuned.changes_of_time(race), looks, drops)
            self.write()

    def confirm(self):
        """Races the best config against the finished loop. Returns the race, None if they are the same."""
        self.ring.end()
        if self.best == self.first:
            return None
        race = tuned.find(self.results["confirmations"], self.best, self.first)
        if race not in self.results["confirmations"]:
            self.results["confirmations"].append(race)
        self.write("the tuned loop beside the finished one")
        with contextlib.suppress(RuntimeError, TimeUp):
            self.take_rounds(race, CONFIRMATION)
        return race
