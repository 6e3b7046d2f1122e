"""Tunes a config for this machine: python profile.py config/x.py --mode=tune [--minutes=10]

A search by measurement. It begins with the finished loop, the config as it is, and changes one setting
(search_space.py) at a time. The first losses must stay the finished loop's. Then the change races against the best
config so far: both train in processes of their own (turns.py) and step in turns, in rounds (rounds.py). A change that
falls behind is dropped at once; one that is seen to be faster takes the place of the best. Settings that depend on
others are then tried again. At the end the best config races against the finished loop; unless it is seen to be faster,
the finished loop wins.

tune.json holds every race. The same command repeats the search, and reads the outcome of a race that is in the file.
"""

import contextlib
import json
import math
import statistics
from pathlib import Path
from time import monotonic

from tqdm import tqdm

from lab import plan, predict, tables, tuned
from lab.measure import WINDOW
from lab.results import default_folder, write
from lab.rounds import CLEAR, SIDES, decide, order
from lab.search_space import SETTINGS, Machine, normal
from lab.tuned import CONFIRMATION, SEARCH
from lab.turns import TimeUp, WorkerPool
from nanoladder import machine
from nanoladder.errors import BadInput

CODE = [f"lab/{name}.py" for name in ("tune", "search_space", "rounds", "turns")]  # races depend on it
HOPELESS = 0.3  # a change of time that needs no rounds if the first steps show it
SHORT = 0.1  # seconds; the first of steps that take less show nothing
FAR = 0.15  # a change of time that is not tried again beside other changes
LEAST_ROUNDS = 3  # that there must be time for when a race starts
PATIENCE = 0.15  # share of the whole time within which a process must be ready, unless that is less than
LEAST_PATIENCE = 60  # seconds, in which a GPU's compiler has done all but autotuning


def tune(options, config, conditions):
    """Searches, prints the table and the verdict, writes tune.json, tune.md and the tuned config.

    config: with its vocab_size. conditions: function that returns those of the results.
    """
    start = monotonic()
    if config.stage:
        raise BadInput(f"stage={config.stage}: --mode=tune begins with the finished loop; expected no --stage")
    conditions = {**conditions(), "config": options.given}
    folder = Path(options.out_dir or default_folder(conditions))
    search = Search(tuned.open_results(folder, conditions), config, folder, options.minutes, start)
    try:
        verdict = search.run()
    finally:
        search.pool.end()
    tuned.report(search.results, verdict, search.untried, folder, options.tuned_dir)


class Unfit(Exception):
    """A change that needs no rounds: it does not fit the memory, or its losses are wrong."""


class Search:
    """A search: what was measured (results), the best changes so far, and the processes that run (pool)."""

    def __init__(self, results, config, folder, minutes, start):
        self.results, self.config, self.folder = results, config, folder
        self.total, self.start = 60 * minutes, start - results["spent"]
        on = results["machine"]
        self.free = None if on["gpu"] else machine.free_memory(machine.choose_device("cpu"))
        self.machine = Machine(bool(on["gpu"]), on["native_bfloat16"], on["threads"])
        self.best, self.pool, self.costs, self.tried, self.untried = {}, WorkerPool(), {}, {}, []

    def run(self):
        """Searches and confirms. Returns the verdict."""
        bar_format = "{l_bar}{bar}| {n_fmt} of {total_fmt} s{postfix}"
        with tqdm(total=round(self.total), bar_format=bar_format, disable=None) as self.bar:
            self.measure_finished()
            self.tried[normal(self.config, self.machine)] = 0.0
            self.sweep(SETTINGS)
            before = None
            while self.best != before:
                before = self.best
                self.sweep([setting for setting in SETTINGS if setting.interacts])
            return tuned.verdict(self.best, self.confirm())

    # -- time and configs

    def left(self):
        """Seconds that are left of the search."""
        return self.total - (monotonic() - self.start)

    def turn_seconds(self):
        """Seconds of a turn: as many whole steps as last for WINDOW."""
        seconds = self.results["seconds"]
        return 1.2 * seconds * math.ceil(WINDOW / seconds)

    def round_seconds(self):
        return 2 * (self.turn_seconds() + (self.start_seconds() if self.pool.apart else 0.0))

    def start_seconds(self):
        return statistics.median(self.pool.starts or [self.results["start_seconds"]])

    def reserve(self):
        """Seconds that the confirmation takes, up to its first look."""
        return 2 * self.start_seconds() + min(CONFIRMATION) * self.round_seconds()

    def race_seconds(self):
        """Seconds that a race needs to be worth its start."""
        return self.start_seconds() + LEAST_ROUNDS * self.round_seconds()

    def reduced(self, changes):
        """The changes without those that leave the config's values."""
        return {field: value for field, value in changes.items() if value != getattr(self.config, field)}

    def changed(self, changes):
        """The config with these changes. Raises BadInput if they do not work together."""
        config = plan.changed(self.config, changes)
        if isinstance(config, BadInput):
            raise config
        return config

    def patience(self):
        """Seconds to wait for a process during the search."""
        return min(self.left() - self.reserve(), max(PATIENCE * self.total, LEAST_PATIENCE))

    def worker(self, changes, limit):
        """The process that trains with these changes. Raises RuntimeError, and TimeUp after `limit` seconds."""
        return self.pool.worker(self.changed(changes), limit)

    def losses(self, changes, limit):
        """The first losses with these changes: without dropout, whose random numbers depend on the kernels."""
        if not self.config.dropout:
            return self.worker(changes, limit).losses
        changes = changes | {"dropout": 0.0}
        losses = self.worker(changes, limit).losses
        self.pool.end(self.changed(changes))
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
                self.results["seconds"] = self.worker({}, self.left()).seconds
                self.results["losses"] = self.losses({}, self.left())
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

    def sweep(self, settings):
        """Tries the values of some settings, from the best config so far."""
        for setting in settings:
            for direction in setting.directions(self.changed(self.best), self.machine):
                for change in direction:
                    if self.challenge(change) > CLEAR:
                        break

    def challenge(self, change):
        """Races the best config with a change against the best. Returns the change of time; infinite if it failed."""
        key, changes = json.dumps(change), self.reduced({**self.best, **change})
        form = json.dumps(changes, sort_keys=True)
        with contextlib.suppress(BadInput):
            form = normal(self.changed(changes), self.machine)
        if form in self.tried or self.costs.get(key, 0.0) > FAR:
            return self.tried.get(form, self.costs.get(key))
        race = tuned.find(self.results["races"], changes, self.best)
        if race["outcome"] is None:
            race["change"] = change
            self.race(race)
        self.costs[key] = self.tried[form] = tuned.cost(race)
        loser = plan.changed(self.config, self.best if race["outcome"] == "kept" else changes)
        self.pool.end(loser)
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
            other = self.worker(race["against"], self.patience())
            self.require_losses(race)
            this = self.worker(race["changes"], self.patience())
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
            self.pool.end()  # either may have failed
        self.write()
        self.bar.write(f"{self.results['spent'] / 60:5.1f} min  {name}: {tuned.outcome(race)}")

    def require_memory(self, race):
        """Raises BadInput for a refused config, Unfit for one too large. Decides if two processes fit at a time."""
        configs, peaks = [self.changed(changes) for changes in (race["changes"], race["against"])], []
        if not self.free:  # a process on a GPU says so itself if memory runs out, and a prediction takes seconds
            return
        for config in configs:
            with contextlib.suppress(BadInput):  # not predictable
                peaks.append(predict.predict_memory(config, self.machine.device_type).peak)
        if len(peaks) < 2:
            return
        race["predicted"] = peaks[0]
        if peaks[0] > self.free:
            raise Unfit(f"{peaks[0] / 1e9:.2f} GB predicted, of {self.free / 1e9:.2f} GB")
        self.pool.apart = self.pool.apart or sum(peaks) > 0.8 * self.free

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
                found[side] = self.worker(sides[side], self.left() - reserve).turn(self.left() - reserve)
            race["rounds"].append({side: found[side] for side in SIDES})
            race["outcome"] = decide(tuned.changes_of_time(race), looks, drops)
            self.write()

    def confirm(self):
        """Races the best config against the finished loop. Returns the race, None if they are the same."""
        self.pool.end()
        if not self.best:
            return None
        race = tuned.find(self.results["confirmations"], self.best, {})
        if race not in self.results["confirmations"]:
            self.results["confirmations"].append(race)
        self.write("the tuned loop beside the finished one")
        with contextlib.suppress(RuntimeError, TimeUp):
            self.take_rounds(race, CONFIRMATION)
        return race
