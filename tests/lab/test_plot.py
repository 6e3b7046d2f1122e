import json
import struct

import pytest

from lab import pictures, plot

ROWS = [  # two steps are logged apart from the evaluation, and the first step is not timed
    {"step": 1, "tokens": 100, "train_loss": 5.0, "lr": 0.1, "peak_memory_gb": 0.5},
    {"step": 2, "tokens": 200, "val_loss": 4.5, "val_bpb": 6.0},
    {"step": 3, "tokens": 300, "train_loss": 4.0, "lr": 0.2, "step_ms": 2000.0, "peak_memory_gb": 0.75},
    {
        "step": 5,
        "tokens": 500,
        "train_loss": 3.0,
        "val_loss": 4.75,
        "val_bpb": 6.5,
        "lr": 0.1,
        "step_ms": 1000.0,
        "sample": "x",
    },
]


@pytest.fixture
def run(tmp_path):
    """run(path, rows, **config) -> the out_dir of a run."""

    def make(path, rows=ROWS, **config):
        folder = tmp_path / path
        folder.mkdir(parents=True)
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "config.json").write_text(json.dumps({"out_dir": path, "max_steps": 5, "n_layer": 2, **config}))
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


def cells(out, name):
    """{heading: cell} of a run's row in the table that was printed."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    [row] = [line for line in lines if line[0] == str(name)]
    return dict(zip(lines[0], row, strict=True))


def test_the_table_has_the_last_values_the_best_and_the_cost(run, run_main):
    folder = run("one")
    result = run_main(plot.main, folder)
    assert result.code == 0 and result.err == ""
    assert cells(result.out, folder) == {
        "": str(folder),
        "step": "5",
        "tokens": "500",
        "train loss": "3.0000",
        "validation loss": "4.7500",
        "best validation": "4.5000",
        "bits/byte": "6.5000",
        "minutes": "0.133",  # 3 × 2 s, the first step too, + 2 × 1 s
        "GB": "0.75",
    }


def test_the_picture_has_both_losses_over_tokens_and_over_time(run, run_main, figures, recwarn):
    folder = run(r"a$\fra{$ 运行 🚀")  # a name is no formula, and the font lacks some of its characters
    assert f"written: {folder / 'overlay.png'}" in run_main(plot.main, folder).out
    over_tokens, over_time = curves(figures[-1])
    assert over_tokens == [[(1e-4, 5), (3e-4, 4), (5e-4, 3)], [(2e-4, 4.5), (5e-4, 4.75)]]
    assert [[round(minute * 60) for minute, _ in curve] for curve in over_time] == [[2, 6, 8], [4, 8]]
    content = (folder / "overlay.png").read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24]) > (1000, 400)
    assert not list(folder.glob(".*.tmp")) and not recwarn.list


def test_runs_are_named_by_their_folders_and_by_the_keys_in_which_they_differ(run, run_main, figures, tmp_path):
    one, two = run("a/x", seed=1), run("b/x", ROWS[:1], seed=2, n_head=3)
    out = run_main(plot.main, one, two, "--key=lr", f"--output={tmp_path / 'x.png'}").out
    assert (cells(out, one)["seed"], cells(out, one)["n_head"]) == ("1", "12")  # the default where a run lacks it
    assert (cells(out, two)["seed"], cells(out, two)["n_head"]) == ("2", "3") and "n_layer" not in cells(out, two)
    assert len(curves(figures[-1])[0]) == 2 and (tmp_path / "x.png").exists()
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [str(one), str(two)]


def test_unfinished_unvalidated_untimed_and_empty_runs(run, run_main, figures):
    unvalidated = [{"step": 1, "tokens": 100, "train_loss": 5.0}]
    cut_off = "".join(json.dumps(row) + "\n" for row in ROWS[:3]) + '{"step": 4, "tok'
    begun, empty, cut = run("begun", unvalidated), run("empty", ""), run("cut", cut_off)
    out = run_main(plot.main, begun, empty, cut).out
    assert cells(out, begun)["train loss"] == "5.0000" and not cells(out, begun)["validation loss"]
    assert cells(out, empty)["step"] == "no step is logged" and cells(out, cut)["step"] == "3"
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
        ([], ["OUT"]),
        (["nowhere"], ["nowhere is not a run", "config.json: No such file", "out_dir"]),
        (["one", "--key=val_los"], ["--key=val_los", "expected one of step, tokens, train_loss"]),
        (["empty"], ["no step is logged yet"]),
        (["one", "--output=nowhere/x.png"], ["nowhere/x.png cannot be written", "--output=FILE.png"]),
        (["one", "--output=x.pdf"], ["--output=x.pdf", "expected FILE.png"]),
        (["list"], ["metrics.jsonl is damaged"]),
        (["text"], ["metrics.jsonl is damaged"]),
        (["infinite"], ["metrics.jsonl is damaged", "not finite"]),
        (["config"], ["config is not a run", "config.json"]),
    ],
)
def test_bad_input_is_one_line(words, named, run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("one")
    run("empty", [])
    run("list", "[1, 2]\n")
    run("text", [{"step": 1, "tokens": 2, "train_loss": "low"}])
    run("infinite", '{"step": 1, "tokens": 2, "train_loss": NaN}\n')
    (run("config") / "config.json").write_text("[3]")
    line = refused(plot.main, *words)
    assert all(part in line for part in named), line
    assert not list(tmp_path.glob("**/*.png"))
