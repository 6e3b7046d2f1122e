"""Tunes a config for this machine: python profile.py config/x.py --mode=tune [--minutes=10]

A search by measurement. It begins with the finished loop, the config as it is, and changes one setting
(search_space.py) at a time. The first losses must stay the finished loop's. Then the change races against the best
config so far: both train in processes of their own (turns.py) and step in turns, in rounds (rounds.py). A change that
falls behind is dropped at once; one that is seen to be faster takes the place of the best. Settings that depend on
others are then tried again. In the last quarter of the time the best config races against the finished loop; unless it
is seen to be faster, the finished loop wins.

tune.json holds every race. The same command repeats the search, and reads the outcome of a race that is in the file.
"""

import contextlib
import json
from pathlib import Path
from time import monotonic

from lab import plan, predict, tables, tuned
from lab.launch import TimeUp
from lab.results import default_folder, write
from lab.rounds import CLEAR, SIDES, decide, order
from lab.search_space import INTERACTING, directions
from lab.tuned import CONFIRMATION, SEARCH
from lab.turns import WorkerPool
from nanoladder import machine
from nanoladder.errors import BadInput

HOPELESS = 0.3  # a change of time that needs no rounds if the first steps show it
SHORT = 0.1  # seconds; the first of steps that take less show nothing
FAR = 0.15  # a change of time that is not tried again beside other changes
SEARCHING = 0.75  # share of the time; the rest is for the confirmation
PATIENCE = 0.15  # share of the time within which a process must be ready, unless that is less than
LEAST_PATIENCE = 60  # seconds, in which a GPU's compiler has done all but autotuning


def tune(options, config, conditions):
    """Searches, prints the table and the verdict, writes tune.json, tune.md and the tuned config.

    config: with its vocab_size. conditions: function that returns those of the results.
    """
    if config.stage:
        raise BadInput(f"stage={config.stage}: --mode=tune begins with the finished loop; expected no --stage")
    if config.dropout:  # its random numbers depend on the kernels
        raise BadInput(f"dropout={config.dropout}: equal losses cannot be expected; expected --dropout=0")
    start, conditions = monotonic(), {**conditions(), "config": options.given}
    folder = Path(options.out_dir or default_folder(conditions))
    search = Search(tuned.open_results(folder, conditions), config, folder, options.minutes, start)
    try:
        verdict = search.run()
    finally:
        search.pool.end()
    tuned.report(search.results, verdict, folder, options.tuned_dir)


class Unfit(Exception):
    """A change that needs no rounds: it does not fit the memory, or its losses are wrong."""


class Search:
    """A search: what was measured (results), the best changes so far, and the processes that run (pool)."""

    def __init__(self, results, config, folder, minutes, start):
        self.results, self.config, self.folder, self.machine = results, config, folder, results["machine"]
        self.total, self.start = 60 * minutes, start - results["spent"]
        self.free = None if self.machine["gpu"] else machine.free_memory(machine.choose_device("cpu"))
        self.best, self.pool, self.costs, self.tried = {}, WorkerPool(), {}, {}

    def run(self):
        """Searches and confirms. Returns the verdict."""
        self.measure_finished()
        self.tried[plan.here(self.config)] = 0.0
        with contextlib.suppress(TimeUp):
            self.sweep(directions(self.config, self.machine))
            before = None
            while self.best != before:
                before = self.best
                self.sweep(INTERACTING)
        return tuned.verdict(self.best, self.confirm())

    def left(self, share=SEARCHING):
        """Seconds that are left of a share of the time."""
        return share * self.total - (monotonic() - self.start)

    def changed(self, changes):
        """The config with these changes. Raises BadInput if they do not work together."""
        config = plan.changed(self.config, changes)
        if isinstance(config, BadInput):
            raise config
        return config

    def worker(self, changes):
        """The process that trains with these changes. Raises RuntimeError, and TimeUp if it is not ready in time."""
        patience = max(PATIENCE * self.total, LEAST_PATIENCE)
        return self.pool.worker(self.changed(changes), min(self.left(), patience))

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
        if form in self.tried or self.costs.get(key, 0.0) > FAR:
            return self.tried.get(form, self.costs.get(key))
        race = tuned.find(self.results["races"], changes, self.best)
        if race["outcome"] is None:
            race["change"] = change
            self.race(race)
        self.costs[key] = self.tried[form] = tuned.cost(race)
        kept = race["outcome"] == "kept"
        self.pool.end(plan.changed(self.config, self.best if kept else changes))
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
            other = self.worker(race["against"])
            this = self.worker(race["changes"])
            if wrong := tables.difference(this.losses, self.results["losses"]):
                raise Unfit(f"WRONG: {wrong}")
            race["first"] = this.seconds / other.seconds - 1
            if race["first"] > HOPELESS and this.seconds > SHORT:
                race["outcome"] = "slower"
            self.take_rounds(race, SEARCH, SEARCHING, drops=True)
        except TimeUp:
            if self.left() < 1:
                raise
            race |= {"outcome": "failed", "note": f"not ready after {monotonic() - start:.0f} s"}
        except (BadInput, Unfit) as error:
            race |= {"outcome": "failed", "note": str(error)}
        except RuntimeError as error:
            race |= {"outcome": "failed", "note": str(error)}
            self.pool.end()  # either may have failed
        self.write()
        print(f"{self.results['spent'] / 60:5.1f} min  {tuned.name(race)}: {tuned.outcome(race)}", flush=True)

    def require_memory(self, race):
        """Raises Unfit for a config that is too large. Decides if two processes fit at a time.

        A GPU's process says so itself if memory runs out; a CPU's may be killed, and others with it.
        """
        if not self.free:
            return
        with contextlib.suppress(BadInput):  # not predictable, or no valid config
            this, other = (predict.predict_memory(self.changed(race[side])).peak for side in ("changes", "against"))
            if this > self.free:
                raise Unfit(f"{this / 1e9:.2f} GB predicted, of {self.free / 1e9:.2f} GB")
            self.pool.apart = self.pool.apart or this + other > 0.8 * self.free

    def take_rounds(self, race, looks, share, drops=False):
        """Adds rounds until there is an outcome (decide). Raises TimeUp if the share of the time is over."""
        sides = {"other": race["against"], "this": race["changes"]}
        while race["outcome"] is None:
            seconds = {}
            for side in order(len(race["rounds"]) + 1):
                worker = self.pool.worker(self.changed(sides[side]), self.left(share))
                seconds[side] = worker.turn(self.left(share))
            race["rounds"].append({side: seconds[side] for side in SIDES})
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
        print("the tuned loop beside the finished one", flush=True)
        with contextlib.suppress(RuntimeError, TimeUp):
            self.take_rounds(race, CONFIRMATION, 1.0)
        self.write()
        return race
