"""Traces that other processes take ahead: the predictions are the same, and nothing is left behind."""

import io
import pickle
import subprocess
import sys
from contextlib import contextmanager

import pytest
from conftest import replace, tiny

from lab import ahead, devices, predict
from lab.trace import take_trace, traced
from nanoladder import machine
from nanoladder.errors import BadInput

H100 = devices.datasheet("H100")
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 32, "context_length": 16, "batch_size": 4, "vocab_size": 64}
EAGER = tiny(**SHAPE, compile=False, dtype="bfloat16")
COMPILED = replace(EAGER, compile=True, compile_scope="block")
ROWS = [
    ("naive", replace(EAGER, dtype="float32")),
    ("refused", BadInput("no such thing")),
    ("loader", EAGER),
    ("compile", COMPILED),
    ("ddp", replace(COMPILED, ddp=True)),
    ("checkpointing", replace(COMPILED, checkpointing="every:1")),
    ("as configured", COMPILED),
]


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """cores(n): this process may use so many; two, unless told otherwise."""
    traced.clear()
    set_cores = lambda n: monkeypatch.setattr(ahead, "n_cores", lambda: n)  # noqa: E731
    set_cores(2)
    return set_cores


@pytest.fixture
def here(monkeypatch):
    """[the group of each call of trace_configs in this process, which does nothing]"""
    groups = []
    monkeypatch.setattr(ahead, "trace_configs", lambda group, *_: groups.append(group))
    return groups


@pytest.fixture
def children(monkeypatch):
    """children(code): from now on the processes run this code. Returns the list of those that were started."""
    found = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            found.append(self)

    def run(code):
        monkeypatch.setattr(ahead, "COMMAND", [sys.executable, "-c", code])
        monkeypatch.setattr(subprocess, "Popen", Recorded)
        return found

    return run


@pytest.mark.slow
def test_predictions_are_the_same_and_need_no_other_traces(monkeypatch):
    def predictions(rows):
        return [predict.predict_row(*row, H100, "cuda") for row in rows]

    rows = [row for row in ROWS if row[0] in ("naive", "compile", "checkpointing")]
    expected = predictions(rows)
    traced.clear()
    rows = list(ahead.trace_rows(rows, H100, "cuda"))
    monkeypatch.setattr("lab.trace.take_trace", lambda *_: pytest.fail("a trace is missing"))
    assert predictions(rows) == expected


def test_rows_that_share_a_trace_are_traced_by_one_process(here, monkeypatch):
    @contextmanager
    def processes(n):
        yield range(n)

    there, configs = [], dict(ROWS)
    monkeypatch.setattr(ahead, "processes", processes)
    monkeypatch.setattr(ahead, "ask", lambda process, group, *_: there.append(group) or {})
    assert list(ahead.trace_rows(ROWS, H100)) == ROWS
    compiled = [configs["compile"], configs["ddp"], configs["as configured"]]
    expected = [[configs["naive"]], [configs["loader"]], compiled, [configs["checkpointing"]]]
    assert sorted([*here, *there], key=expected.index) == expected


def test_a_row_comes_as_soon_as_its_traces_are_there(cores, here):
    cores(1)
    traced_before = [(name, len(here)) for name, _ in ahead.trace_rows(ROWS, H100)]
    counts = {"naive": 1, "refused": 1, "loader": 2, "compile": 3, "ddp": 3, "checkpointing": 4, "as configured": 4}
    assert traced_before == list(counts.items())


@pytest.mark.parametrize("limit", ["cores", "memory", "rows"])
def test_with_room_for_one_process_all_is_traced_here(limit, cores, here, children, monkeypatch):
    found, rows = children("1 / 0"), ROWS
    match limit:
        case "cores":
            cores(1)
        case "memory":
            monkeypatch.setattr(machine, "free_memory", lambda _: 1.9e9)
        case "rows":
            rows = ROWS[:5]
    list(ahead.trace_rows(rows, H100))
    assert not found and any(COMPILED in group for group in here)


def test_the_traces_of_a_search_for_what_fits_are_taken_too(cores, monkeypatch):
    cores(1)
    rows = [("naive", replace(EAGER, batch_size=8))]
    [(name, config)] = ahead.trace_rows(rows, H100, "cuda", memory_gb=0.0679)
    monkeypatch.setattr("lab.trace.take_trace", lambda *_: pytest.fail("a trace is missing"))
    assert predict.predict_row(name, config, H100, "cuda", memory_gb=0.0679)["fits"] > 0


def test_a_trace_that_fails_is_left_to_who_needs_it(cores, monkeypatch):
    def fail(config, *rest):
        if config.dtype == "float32":
            raise RuntimeError("planted")
        return take_trace(config, *rest)

    cores(1)
    monkeypatch.setattr("lab.trace.take_trace", fail)
    rows = [*ROWS[:3], ("open", replace(EAGER, micro_batch_size="auto"))]
    naive, *others = ahead.trace_rows(rows, H100)
    notes = [predict.predict_row(*row, H100)["note"] for row in others]
    assert notes[:2] == ["no such thing", None] and notes[2].startswith("micro_batch_size=auto")
    with pytest.raises(RuntimeError, match="planted"):
        predict.predict_row(*naive, H100)


@pytest.mark.parametrize(
    "code", ["import os; os.kill(os.getpid(), 9)", "import os, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), 9)"]
)
def test_what_a_killed_process_leaves_is_traced_here(code, children, here):
    found = children(code)
    list(ahead.trace_rows(ROWS, H100))
    assert sorted(map(len, here)) == [1, 1, 1, 3]
    assert [child.returncode for child in found] == [-9]


def test_an_interrupt_ends_the_processes(cores, children, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    cores(8)
    found = children("import time; time.sleep(1000)")
    monkeypatch.setattr(ahead, "trace_configs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(ahead.trace_rows(ROWS, H100))
    assert [child.returncode for child in found] == [-9]  # one fewer than there are compiled programs


def test_a_process_answers_each_request_with_its_traces_until_stdin_ends():
    requests, answers = io.BytesIO(), io.BytesIO()
    configs = [replace(EAGER, n_embd=32 * n) for n in (1, 2)]
    for config in configs:
        pickle.dump(([config], H100, "cpu", 1, 0.0), requests)
    requests.seek(0)
    ahead.answer(requests, answers)
    answers.seek(0)
    for config in configs:
        found = pickle.load(answers)
        assert len(found) == 2 and all(key[0].n_embd == config.n_embd for key in found)  # of its memory and its time
    assert not answers.read()
