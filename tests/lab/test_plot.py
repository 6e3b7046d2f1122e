"""lab.plot lays runs over each other, over tokens and over the time of their steps."""

import json
import struct

import pytest

from lab import pictures, plot

ROWS = [  # two steps are logged apart from the evaluation, and the first step is not timed
    {"step": 1, "tokens": 100, "train_loss": 5.0, "lr": 0.1},
    {"step": 2, "tokens": 200, "val_loss": 4.5},
    {"step": 3, "tokens": 300, "train_loss": 4.0, "lr": 0.2, "step_ms": 2000.0},
    {"step": 5, "tokens": 500, "train_loss": 3.0, "val_loss": 4.75, "lr": 0.1, "step_ms": 1000.0, "sample": "x"},
]


@pytest.fixture
def run(tmp_path):
    """run(path, rows) -> the out_dir of a run; rows: a list, or the text of metrics.jsonl."""

    def make(path, rows=ROWS):
        folder = tmp_path / path
        folder.mkdir(parents=True)
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "config.json").write_text("{}")
        return folder

    return make


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    found = []

    def subplots(*shape, **options):
        figure, axes = pictures.subplots(*shape, **options)
        found.append(figure)
        return figure, axes

    monkeypatch.setattr(plot, "subplots", subplots)
    return found


def curves(figure):
    """The curves over tokens and those over time, each as its points."""
    return [[list(zip(*line.get_data(), strict=True)) for line in axis.lines] for axis in figure.axes]


def test_the_picture_has_both_losses_over_tokens_and_over_time(run, run_main, figures, recwarn):
    folder = run(r"a$\fra{$ 运行 🚀")  # a name is no formula, and the font lacks some of its characters
    assert f"written: {folder / 'overlay.png'}" in run_main(plot.main, folder).out
    over_tokens, over_time = curves(figures[-1])
    assert over_tokens == [[(1e-4, 5), (3e-4, 4), (5e-4, 3)], [(2e-4, 4.5), (5e-4, 4.75)]]
    assert [[round(minute * 60) for minute, _ in curve] for curve in over_time] == [[2, 6, 8], [4, 8]]
    content = (folder / "overlay.png").read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24]) > (1000, 400)
    assert not list(folder.glob(".*.tmp")) and not recwarn.list


def test_runs_are_named_by_their_folders_with_their_last_values(run, run_main, figures, tmp_path):
    one, two = run("a/x"), run("b/x", ROWS[:1])
    run_main(plot.main, one, two, "--key=lr", f"--output={tmp_path / 'x.png'}")
    assert len(curves(figures[-1])[0]) == 2 and (tmp_path / "x.png").exists()
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [f"{one}: 0.1", f"{two}: 0.1"]


def test_unfinished_unvalidated_untimed_and_empty_runs(run, run_main, figures):
    unvalidated = [{"step": 1, "tokens": 100, "train_loss": 5.0}]
    cut_off = "".join(json.dumps(row) + "\n" for row in ROWS[:3]) + '{"step": 4, "tok'
    begun, empty, cut = run("begun", unvalidated), run("empty", ""), run("cut", cut_off)
    assert run_main(plot.main, begun, empty, cut).code == 0
    over_tokens, over_time = curves(figures[-1])
    assert len(over_tokens) == 3 and len(over_time) == 2  # validation of one; of the other no time


def test_the_steep_start_of_a_loss_is_cut_off(run, run_main, figures):
    rows = [{"step": n, "tokens": n, "train_loss": 100.0 if n <= 2 else 2 + 1 / n} for n in range(1, 41)]
    run_main(plot.main, run("one", rows))
    bottom, top = figures[0].axes[0].get_ylim()
    assert 1.9 < bottom < 2.025 and 2.2 < top < 3


@pytest.mark.parametrize(
    "words, named",
    [
        (["one", "--key=val_los"], ["--key=val_los", "expected one of step, tokens, train_loss"]),
        (["empty"], ["no step is logged yet"]),
        (["one", "--output=nowhere/x.png"], ["nowhere/x.png cannot be written", "--output=FILE.png"]),
    ],
)
def test_bad_input_is_one_line(words, named, run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("one")
    run("empty", [])
    line = refused(plot.main, *words)
    assert all(part in line for part in named), line
    assert not list(tmp_path.glob("**/*.png"))
