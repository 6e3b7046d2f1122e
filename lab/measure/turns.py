"""Rows take turns: the processes that are alive, the order in which they step, and when a row is measured enough.

A round starts a process of every row and, once all have compiled and warmed up, lets them take turns of TURN seconds;
then it ends them, so that no row depends on one process, whose memory layout may be lucky. A machine's speed drifts
within seconds: two rows are compared turn by turn, and a round's figure is the mean of the middle half of these
differences. A turn in which other programs took a core is taken again, which waits for the end of a burst. Rounds then
give an interval (stats.py). A row whose intervals are narrow enough is left out of later rounds, which leaves their
time to the others. Narrow is a width, never a gain, so that stopping early favors none.
"""

import contextlib
import math
import statistics
import time

from lab.measure.stats import LOOKED, intervals, trimmed_mean
from nanoladder.errors import BadInput

TURN = 0.3  # seconds of steps, at least one step
LEAST_TURNS, MOST_TURNS = 4, 12  # of a row in a round
DISTURBED = 0.1  # seconds that threads wait for a core, per second of a turn
ROUNDS = 5  # of every row, for which the time is planned; more are for rows that need them
NARROW = 0.03  # half width of an interval, of a logarithm, at which a row is measured enough
OUT_OF_MEMORY = ("out of memory", "killed by the system")  # a row may have failed because others were alive


def turns_of(figures):
    """Seconds of a step in each turn of a process; of one that took no turns, its seconds."""
    return figures.get("turns") or [figures["seconds"]]


def differences(other, row):
    """The logarithms of how many times as fast a row is as another one, in the rounds common to both.

    other, row: {round: seconds of a step in each turn}. A round's is the mean of the middle half of the turns'; of rows
    that did not take turns with each other, of as many turns as both have.
    """
    rounds = [zip(other[number], row[number], strict=False) for number in row if number in other]
    return [float(trimmed_mean([math.log(a / b) for a, b in turns], part=4)) for turns in rounds]


def take_turns(live, attempt, goes_on):
    """Lets processes, {name: launch.Processes}, take turns while goes_on(number of turns so far).

    Every second turn goes backwards, so that no row always follows the same one. A disturbed turn is taken again, as
    long as more turns were undisturbed than taken again: on a machine that is always busy, few are. attempt(name,
    function, *arguments) calls a function of a row's process; it may remove the row. Returns {row that is still live:
    seconds of its steps}.
    """
    times, turn, left = {name: [] for name in live}, 0, 0
    while live and goes_on(turn):
        for name in [*live][:: -1 if turn % 2 else 1]:
            figures = attempt(name, live[name].ask, TURN)
            while figures and figures["waited"] > DISTURBED and left:
                figures, left = attempt(name, live[name].ask, TURN), left - 1
            if figures:
                times[name].append(figures["seconds"])
                left += figures["waited"] <= DISTURBED
        turn += 1
    return {name: times[name] for name in live}


def figures_of(figures, seconds):
    """The figures of a process, with the seconds of a step in its turns."""
    return figures | {"seconds": statistics.median(seconds), "turns": [float(f"{each:.5g}") for each in seconds]}


class Schedule:
    """Measures rows in rounds until every pair is known narrowly or the seconds are spent; in ROUNDS at least.

    names: the rows in order; all are compared with the first. pairs: [(row, the row that it is compared with)].
    start(name): the launch.Processes of a row, which live. needs: {name: bytes that they take}; free: bytes that all
    may take together. measured: {name: figures of its rounds}, to which add({name: figures}) adds those of a round.
    fail(name, reason): called for a row that fails; the others go on. show(text): replaces the line of the progress.
    tell(text): prints a line.
    """

    def __init__(
        self, names, pairs, start, measured, add, fail, seconds, needs=None, free=math.inf, show=print, tell=print
    ):
        self.names, self.pairs, self.start, self.measured = list(names), pairs, start, measured
        self.add, self.fail, self.show, self.tell, self.needs, self.free = add, fail, show, tell, needs or {}, free
        self.alone = set()  # rows that ran out of memory beside others
        over = [figures for name in names for figures in measured[name]]
        self.number = max((figures["round"] for figures in over), default=0)
        self.passes = max((len(measured[name]) for name in names), default=0)  # through all rows
        self.shortest = 0.0  # seconds of the next pass, with as few turns as possible
        self.end = time.monotonic() + seconds - sum(figures["took"] for figures in over)

    def measure(self):
        while names := self.wanted():
            if self.passes >= ROUNDS and time.monotonic() + self.shortest > self.end:
                break
            groups, self.shortest = self.groups(names), 0.0
            for number, group in enumerate(groups):
                left = self.end - time.monotonic()
                self.take_round(group, left / max(1, ROUNDS - self.passes) / (len(groups) - number))
            self.passes += 1
            late = (time.monotonic() + (ROUNDS - self.passes) * self.shortest - self.end) / 60
            if self.passes == 1 and late > 1:
                self.tell(f"{ROUNDS} rounds take about {late:.0f} minutes longer than announced")

    def wanted(self):
        """The rows to measure, in order: those of pairs that are not known narrowly yet, and the first."""
        seconds = {name: {each["round"]: turns_of(each) for each in self.measured[name]} for name in self.names}
        rows = {name for name in self.names if len(seconds[name]) < ROUNDS}
        pairs = [pair for pair in self.pairs if {*pair} <= {*self.names}]
        ratios = {(row, other): differences(seconds[other], seconds[row]) for row, other in pairs}
        known = intervals({pair: each for pair, each in ratios.items() if len(each) >= ROUNDS}, LOOKED)
        rows.update(*(pair for pair in ratios if pair not in known or known[pair].high - known[pair].low > 2 * NARROW))
        return [name for name in self.names if name in rows or (rows and name == self.names[0])]

    def groups(self, names):
        """Divides rows into groups that fit in memory, each with the first row and the others of its rows' pairs."""
        groups, first = [], names[0]
        for name in names[1:] or names:
            group = [first, *(other for row, other in self.pairs if row == name and other in names), name]
            if groups and self.fits({*groups[-1], *group}):
                group = [*groups.pop(), *group]
            groups.append(list(dict.fromkeys(group)))
        return groups

    def fits(self, group):
        """True if the processes of these rows may be alive together."""
        together = len(group) == 1 or self.alone.isdisjoint(group)
        return together and sum(self.needs.get(name, 0) for name in group) <= self.free

    def take_round(self, group, seconds):
        """Measures each row of a group in about as many seconds, and adds their figures.

        Rows that do not fit in memory together take all their turns one after the other.
        """
        self.number += 1
        parts = [group] if self.fits(group) else [[name] for name in group]
        for names in parts:
            start_time = time.monotonic()
            figures = self.take_part(names, seconds / len(parts))
            took = (time.monotonic() - start_time) / max(1, len(figures))
            self.add({name: {"round": self.number, "took": took, **each} for name, each in figures.items()})

    def take_part(self, names, seconds):
        """Starts the processes of rows, and lets them take turns. Returns {row: figures}, without rows that fail."""
        start_time, live, figures = time.monotonic(), {}, {}

        def attempt(name, function, *arguments):
            try:
                return function(*arguments)
            except (BadInput, RuntimeError) as error:
                live.pop(name).kill()  # its memory is for the others
                if live and str(error).startswith(OUT_OF_MEMORY):
                    self.alone.add(name)
                else:
                    self.names.remove(name)
                    self.fail(name, str(error))

        def goes_on(turn):
            passed = time.monotonic() - start_time
            a_turn = (passed - startup) / max(1, turn)
            self.lasts = startup + LEAST_TURNS * a_turn
            self.show(f"round {self.number}, {turn} turns of {len(live)} rows")
            return turn < LEAST_TURNS or (turn < MOST_TURNS and passed + a_turn <= seconds)

        with contextlib.ExitStack() as stack:
            for name in names:
                self.show(f"round {self.number}, starting {name}")
                live[name] = stack.enter_context(self.start(name))
                attempt(name, live[name].answer)
            startup = time.monotonic() - start_time
            times = take_turns(live, attempt, goes_on)
            for name in times:
                figures[name] = attempt(name, live[name].end)
        self.shortest += self.lasts if live else 0.0
        return {name: figures_of(figures[name], times[name]) for name in live}
