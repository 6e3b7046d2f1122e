"""The engine of runs measures each row once, resumes after any interruption, and keeps conditions and writers apart."""

import itertools
import json

import pytest

from lab.measure.results import free_folder, under
from lab.measure.runs import RUNS, Failed, Runs, read
from nanoladder.errors import BadInput

ROWS = [{"name": name, "what": "time", "round": n} for n in (1, 2) for name in ("a", "b")]


@pytest.fixture
def opened(tmp_path):
    """opened(...) -> Runs of kind "steps" in the test's folder."""

    def make(conditions=None, kind="steps", **settings):
        return Runs(tmp_path / RUNS, kind, conditions or {"code": "1"}, **settings)

    return make


def taken(runs, measure=lambda row: {"seconds": 1.0}, rows=ROWS, **settings):
    """The rows that are measured, in order."""
    return [run.row for run in runs.take(lambda: rows, measure, **settings)]


@pytest.mark.parametrize("stop", range(5))
def test_rows_that_are_there_cost_nothing_and_an_interrupted_measurement_resumes(stop, opened):
    def measure(row):
        asked.append(row)
        if len(asked) == stop:
            raise KeyboardInterrupt
        return {"seconds": float(len(asked))}

    asked = []
    with opened() as runs:
        if stop:
            with pytest.raises(KeyboardInterrupt):
                taken(runs, measure)
            assert len(list(runs)) == stop - 1
    with opened() as runs:
        assert taken(runs, measure) == ROWS[max(0, stop - 1) :]
        assert [run.row for run in runs] == ROWS and taken(runs, measure) == []
    assert len(asked) == len(ROWS) + bool(stop)
    assert read(runs.path, "steps")[1] == list(runs)


@pytest.mark.parametrize("lost", range(1, 60))
def test_a_torn_last_line_is_measured_again_and_the_others_stand(lost, opened):
    with opened() as runs:
        taken(runs)
    content = runs.path.read_bytes()
    runs.path.write_bytes(content[:-lost])
    assert [run.row for run in read(runs.path, "steps")[1]] == ROWS[:-1]
    with opened() as again:
        assert taken(again) == ROWS[-1:]
    assert runs.path.read_bytes() == content


def test_a_row_that_failed_is_skipped_in_this_session_and_tried_again_in_the_next(opened):
    def measure(row):
        if row["name"] == "a":
            raise Failed("out of memory")
        return {"seconds": 1.0}

    with opened() as runs:
        assert taken(runs, measure) == ROWS
        assert runs.figures(ROWS[0]) is None and next(iter(runs)).failed == "out of memory"
    with opened() as runs:
        assert taken(runs) == [row for row in ROWS if row["name"] == "a"]
        assert all(run.failed is None for run in runs) and len(list(runs)) == len(ROWS)


def test_the_next_rows_may_depend_on_what_was_found(opened):
    def wanted():
        return [{"name": "a", "round": n} for n in range(1, 4 + 1) if len(list(runs)) < 3]

    with opened() as runs:
        assert len(list(runs.take(wanted, lambda row: {"seconds": 1.0}))) == 3


def test_several_rows_run_at_once_and_end_when_interrupted_and_none_starts_after_the_end(opened, monkeypatch):
    monkeypatch.setattr("lab.measure.runs.PAUSE", 0.0)

    def measure(row):
        running.append(row)
        try:
            for _ in range(5 if row["name"] == "a" else 2):
                most.append(len(running))
                yield
            if row["round"] == stop:
                raise KeyboardInterrupt
            return {"seconds": 1.0}
        finally:
            running.remove(row)

    running, most, stop = [], [], 2
    with opened() as runs, pytest.raises(KeyboardInterrupt):
        taken(runs, measure, at_once=2)
    assert max(most) == 2 and not running
    stop, clock = 3, itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with opened() as runs:
        assert len(taken(runs, measure, rows=ROWS + [{"name": "c", "round": n} for n in range(99)], end=4)) < 10


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_each_look_at_what_runs_and_a_file_gets_a_line_a_minute(terminal, opened, monkeypatch, capsys):
    monkeypatch.setattr("lab.measure.runs.PAUSE", 0.001)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)

    def measure(row):
        for _ in range(50):
            yield
        return {"seconds": 1.0}

    with opened() as runs:
        taken(runs, measure)
    shown = capsys.readouterr().err.count("\r")
    assert shown > 20 if terminal else shown < 4


def test_other_conditions_are_refused_or_begin_anew_and_each_kind_has_its_own(opened):
    with opened() as runs:
        taken(runs)
    with (
        pytest.raises(BadInput, match=r"was measured under another code; choose another --out_dir"),
        opened({"code": "2"}),
    ):
        pass
    with opened({"code": "2"}, kind="judge") as runs:
        assert taken(runs, rows=ROWS[:2]) == ROWS[:2]
    with opened(origin={"commit": "x"}) as runs:
        assert list(map(taken, [runs])) == [[]]
        taken(runs, rows=[{"name": "c"}])
    assert [run.conditions.get("commit") for run in read(runs.path, "steps")[1]] == [None] * 4 + ["x"]
    with opened({"code": "3"}, kind="judge", anew=True) as runs:
        assert taken(runs, rows=ROWS[:1]) == ROWS[:1]
        runs.restart()
        assert taken(runs, rows=ROWS[:1]) == ROWS[:1] and len(list(runs)) == 1
    assert len(read(runs.path, "judge")[1]) == 1 and len(read(runs.path, "steps")[1]) == 5


def test_results_of_something_else_stay_in_their_folder_and_the_next_one_is_taken(tmp_path, capsys):
    first, second, third = (tmp_path / name for name in ("x", "x-2", "x-3"))

    def folder(code):
        return free_folder(first, "table.md", "steps", under({"code": code}))

    assert folder("1") == first and not capsys.readouterr().out
    for path, code in ((first, "1"), (second, "2")):
        with Runs(folder(code) / RUNS, "steps", {"code": code}) as runs:
            taken(runs)
        assert runs.path.parent == path
    assert (folder("1"), folder("2"), folder("3")) == (first, second, third)
    assert "these go to" in capsys.readouterr().out
    third.mkdir()
    assert folder("3") == third
    (third / "table.md").write_text("measured by an older version, without its runs")
    assert folder("3") == tmp_path / "x-4"


def test_one_process_writes_to_a_folder_and_words_for_the_reader_are_not_part_of_a_row(opened, tmp_path, monkeypatch):
    with opened() as runs:
        runs.add({"keys": {"seed": 1}, "about": {"name": "a"}}, {"loss": 1.0})
        assert {"keys": {"seed": 1}, "about": {"name": "b"}} in runs
        runs.put({"keys": {"seed": 1}}, {"loss": 1.0})
        assert len(runs.path.read_text().splitlines()) == 2

    def held(_):
        raise BlockingIOError

    monkeypatch.setattr("nanoladder.files.hold", held)
    with pytest.raises(BadInput, match="another command writes to"), opened():
        pass


@pytest.mark.parametrize("text", ["[]\n", "nothing\n", '{"name": "a"}\n', json.dumps({"format_version": 2}) + "\n"])
def test_a_file_of_another_format_is_refused_in_one_line(text, opened, tmp_path):
    (tmp_path / RUNS).write_text(text)
    with (
        pytest.raises(BadInput, match=r"runs.jsonl is not a file of runs of profile.py \(.*\); expected one"),
        opened(),
    ):
        pass
    assert (tmp_path / RUNS).read_text() == text
