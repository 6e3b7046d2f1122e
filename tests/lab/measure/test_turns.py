"""Rows in turns, on a simulated machine: gains are told from noise, memory and minutes are kept, rows may fail."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from lab.measure import stats, turns

STAGES = 14  # rows of the quickstart's ladder
TABLES = 60


class Machine:
    """A machine that other programs slow down in bursts, and its clock.

    steps: {row: seconds of a step on the quiet machine}. A process is faster or slower than others of its row by
    `layout`. A burst slows by `slowed`, lasts as long as the pause after it, and both are `burst` seconds on average.
    The machine's own speed drifts by `drift` within about two seconds, and every turn differs by `jitter`.
    """

    def __init__(
        self, seed, steps, burst=3.0, slowed=1.8, layout=0.01, drift=0.1, jitter=0.06, starts=2.0, memory=None
    ):
        self.random, self.now, self.steps = np.random.default_rng(seed), 0.0, steps
        self.burst, self.slowed, self.layout, self.starts = burst, slowed, layout, starts
        self.drift, self.jitter = drift, jitter
        self.busy, self.until, self.pace, self.drifted = False, 0.0, 0.0, 0.0
        self.alive, self.log, self.memory, self.most = [], [], memory, 0
        self.fails, self.stops, self.layouts = None, math.inf, {}

    def work(self, seconds):
        """Lets time pass until work of that many quiet seconds is done. Returns those that it waited for a core."""
        waited = 0.0
        while seconds > 0:
            if self.now >= self.until:
                self.busy = not self.busy and self.burst > 0
                self.until = self.now + self.random.exponential(self.burst or 1e9)
            if self.now > self.drifted + 0.1:
                kept = math.exp((self.drifted - self.now) / 2)
                self.pace = kept * self.pace + self.random.normal(0, self.drift * math.sqrt(1 - kept**2))
                self.drifted = self.now
            if self.now > self.stops:
                raise KeyboardInterrupt
            slow = math.exp(self.pace) * (self.slowed if self.busy else 1.0)
            passed = min(seconds * slow, self.until - self.now + 1e-9, 0.1)
            self.now += passed
            seconds -= passed / slow
            waited += passed * (1 - 1 / self.slowed) * self.busy
        return waited

    def start(self, name):
        return Process(self, name)


class Process:
    """A process of a row on a Machine, as launch.Processes."""

    def __init__(self, machine, name):
        self.machine, self.name = machine, name
        self.step = machine.steps[name] * math.exp(machine.random.normal(0, machine.layouts.get(name, machine.layout)))
        machine.alive.append(self)
        machine.most = max(machine.most, len(machine.alive))
        machine.log.append(("start", name))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        if self in self.machine.alive:
            self.machine.alive.remove(self)

    def answer(self):
        self.machine.work(self.machine.starts)
        return self.ask(0)

    def ask(self, seconds):
        machine = self.machine
        if machine.fails == self.name:
            raise RuntimeError("no such key")
        if machine.memory and len(machine.alive) > machine.memory:
            raise RuntimeError("out of memory")
        n, begin = max(1, round(seconds / self.step)), machine.now
        machine.log.append(("step", self.name))
        waited = machine.work(n * self.step * math.exp(machine.random.normal(0, machine.jitter)))
        passed = machine.now - begin
        return {"seconds": passed / n, "waited": waited / passed}

    def end(self):
        return {"tokens": 64}


def measure(machine, monkeypatch, minutes=7, measured=None, **options):
    """Measures a ladder of the machine's rows. Returns the Schedule; its `failed` are the rows that did."""
    monkeypatch.setattr(turns.time, "monotonic", lambda: machine.now)
    names, failed = list(machine.steps), {}
    pairs = [(name, names[0]) for name in names[1:]] + list(zip(names[2:], names[1:], strict=False))
    measured = {name: [] for name in names} if measured is None else measured

    def add(found):
        for name, figures in found.items():
            measured[name].append(figures)

    options |= {"show": lambda text: None}
    schedule = turns.Schedule(names, pairs, machine.start, measured, add, failed.__setitem__, 60 * minutes, **options)
    schedule.failed = failed
    schedule.measure()
    return schedule


def gains(schedule):
    """{(row, other): Interval} of all pairs."""
    seconds = {name: {each["round"]: each["turns"] for each in found} for name, found in schedule.measured.items()}
    found = {(row, other): turns.differences(seconds[other], seconds[row]) for row, other in schedule.pairs}
    return stats.intervals(found, stats.LOOKED)


def ladder(gain=1.0):
    """Rows whose step takes 0.35 s on naive; row 7 and those above it are `gain` times as fast."""
    return {f"row {n}": 0.35 / (gain if n >= 7 else 1) for n in range(STAGES)}


STEADY = {"drift": 0.01, "jitter": 0.02}
NOISES = {"drift": {"burst": 0.0}, "bursts": {"burst": 3.0, **STEADY}}


def test_a_table_without_gains_shows_one_at_most_once_in_20_and_keeps_its_minutes(monkeypatch):
    wrong = 0
    for noise, seed in itertools.product(NOISES.values(), range(TABLES)):
        machine = Machine(seed, ladder(), **noise)
        wrong += any(gain.significant for gain in gains(measure(machine, monkeypatch)).values())
        assert machine.now < 1.1 * 7 * 60
    assert wrong <= 0.05 * len(NOISES) * TABLES


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_gain_of_1_1_is_seen_nine_times_in_ten_also_beside_bursts_of_another_program(noise, monkeypatch):
    machines = (Machine(seed, ladder(1.1), **noise) for seed in range(TABLES))
    schedules = (measure(machine, monkeypatch, minutes=12) for machine in machines)
    seen = sum(gains(schedule)["row 7", "row 6"].low > 0 for schedule in schedules)
    assert seen >= 0.9 * TABLES


def test_a_turn_that_another_program_disturbs_is_taken_again_but_not_for_ever(monkeypatch):
    machine = Machine(0, ladder(), burst=3.0, slowed=4.0, **STEADY)
    processes = itertools.chain(*measure(machine, monkeypatch).measured.values())
    seconds = np.concatenate([each["turns"] for each in processes])
    assert np.mean(seconds > 0.5) < 0.1  # although half of all time is disturbed


def test_on_a_machine_that_is_always_busy_no_turn_is_taken_again():
    asked = []
    busy = SimpleNamespace(ask=lambda seconds: asked.append(seconds) or {"seconds": 1.0, "waited": 1.0})
    times = turns.take_turns({"a": busy, "b": busy}, lambda name, ask, seconds: ask(seconds), lambda turn: turn < 5)
    assert times == {"a": [1.0] * 5, "b": [1.0] * 5} and len(asked) == 10


def test_rows_that_are_known_narrowly_leave_their_time_to_the_others(monkeypatch):
    steps = ladder() | {"noisy": 0.35}
    machine = Machine(0, steps, burst=0.0, layout=0.001, **STEADY)
    machine.layouts["noisy"] = 0.2
    schedule = measure(machine, monkeypatch, minutes=12)
    rounds = {name: len(found) for name, found in schedule.measured.items()}
    assert rounds.pop("noisy") == rounds["row 0"] > turns.ROUNDS
    assert rounds["row 3"] < rounds["row 0"]
    quiet = Machine(0, ladder(), burst=0.0, layout=0.001, drift=0.01, jitter=0.001)
    measure(quiet, monkeypatch, minutes=12)
    assert quiet.now < 0.9 * 12 * 60  # nothing is left to know


def test_every_row_of_a_round_takes_as_many_turns_beside_the_others_and_no_process_is_used_twice(monkeypatch):
    machine = Machine(0, ladder(), burst=0.0)
    schedule = measure(machine, monkeypatch)
    for number in range(1, turns.ROUNDS + 1):
        found = [each for all in schedule.measured.values() for each in all if each["round"] == number]
        assert len(found) == STAGES and len({len(each["turns"]) for each in found}) == 1
        assert len(found[0]["turns"]) >= turns.LEAST_TURNS
    assert sum(what == "start" for what, _ in machine.log) == sum(map(len, schedule.measured.values()))
    steps = [name for what, name in machine.log if what == "step"]
    first = steps.index("row 13") + 1  # the warm-ups end
    assert steps[first : first + 2 * STAGES] == [*ladder(), *reversed(ladder())]
    assert machine.alive == []


def test_rows_are_alive_together_only_as_far_as_memory_allows(monkeypatch):
    machine = Machine(0, ladder(), burst=0.0)
    needs = dict.fromkeys(machine.steps, 10) | {"row 5": 95}
    schedule = measure(machine, monkeypatch, needs=needs, free=60)
    assert 1 < machine.most <= 6 and not schedule.failed
    assert all(gain.high - gain.low < 1 for gain in gains(schedule).values())
    row = [each["round"] for each in schedule.measured["row 6"]]
    assert {each["round"] for each in schedule.measured["row 5"]}.intersection(row)  # compared although it is alone


def test_rows_that_run_out_of_memory_beside_others_are_measured_alone(monkeypatch):
    machine = Machine(0, {"a": 0.3, "b": 0.3, "c": 0.3}, burst=0.0, memory=2)
    schedule = measure(machine, monkeypatch)
    assert not schedule.failed and min(map(len, schedule.measured.values())) >= turns.ROUNDS
    machine = Machine(0, {"a": 0.3, "b": 0.3}, burst=0.0, memory=0.5)
    assert measure(machine, monkeypatch).failed == dict.fromkeys("ab", "out of memory")


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_row_that_fails_is_left_out_and_the_others_go_on(failing, monkeypatch):
    machine = Machine(0, {"a": 0.3, "b": 0.3, "c": 0.3}, burst=0.0)
    machine.fails = failing
    schedule = measure(machine, monkeypatch)
    assert schedule.failed == {failing: "no such key"} and machine.alive == []
    assert {name: len(found) >= turns.ROUNDS for name, found in schedule.measured.items()} == {
        name: name != failing for name in "abc"
    }


def test_an_interrupted_measurement_continues_and_a_finished_one_costs_nothing(monkeypatch):
    machine, measured = Machine(0, {"a": 0.3, "b": 0.3}), {"a": [], "b": []}
    machine.stops = 20.0
    with pytest.raises(KeyboardInterrupt):
        measure(machine, monkeypatch, measured=measured)
    before = [len(found) for found in measured.values()]
    assert before[0] == before[1] > 0 and machine.alive == []
    machine.stops = math.inf
    measure(machine, monkeypatch, measured=measured)
    assert [each["round"] for each in measured["a"]] == list(range(1, len(measured["a"]) + 1))
    started = len(machine.log)
    measure(machine, monkeypatch, measured=measured)
    assert len(machine.log) == started
