"""lab.plot lays runs over each other."""

import json

import pytest
from matplotlib.figure import Figure

from lab import plot

ROWS = [  # a step is logged apart from the evaluation
    {"step": 1, "tokens": 100, "train_loss": 50.0},
    {"step": 2, "tokens": 200, "val_loss": 4.5},
    *({"step": n, "tokens": 100 * n, "train_loss": 4.0 - n / 100, "val_loss": 4.75} for n in range(3, 15)),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(path, rows) -> the out_dir of a run."""
    monkeypatch.chdir(tmp_path)

    def make(path, rows=ROWS):
        folder = tmp_path / path
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.json").write_text("{}")
        return folder

    return make


def test_runs_are_named_by_their_folders_with_their_last_values(run, run_main, monkeypatch, recwarn):
    figures, save = [], plot.save
    monkeypatch.setattr(plot, "save", lambda figure, path: [figures.append(figure), save(figure, path)])
    one, two = run(r"a/$\fra{$ 运行 🚀"), run("b/x", ROWS[:3])  # a name is no formula; the font lacks some characters
    assert f"written: {one / 'overlay.png'}" in run_main(plot.main, one, two, "--key=train_loss").out
    assert (one / "overlay.png").read_bytes().startswith(b"\x89PNG") and not recwarn.list
    axis = figures[0].axes[0]
    assert isinstance(figures[0], Figure)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [f"{one}: 3.86", f"{two}: 3.97"]
    assert list(zip(*axis.lines[1].get_data(), strict=True)) == [(1e-4, 50.0), (3e-4, 3.97)]
    run_main(plot.main, one, "--key=train_loss")
    assert figures[1].axes[0].get_ylim()[1] < 5  # the steep start is cut off


@pytest.mark.parametrize(
    "words, named",
    [
        (["one", "--key=val_los"], ["--key=val_los", "expected one of step, tokens, train_loss"]),
        (["empty"], ["expected one of a run that has logged a step"]),
        (["one", "--output=nowhere/x.png"], ["nowhere/x.png cannot be written", "--output=FILE.png"]),
    ],
)
def test_bad_input_is_one_line(words, named, run, refused, tmp_path):
    run("one")
    run("empty", [])
    line = refused(plot.main, *words)
    assert all(part in line for part in named), line
    assert not list(tmp_path.glob("**/*.png"))
