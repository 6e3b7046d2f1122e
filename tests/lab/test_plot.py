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
    """The cells of a row of the tables that were printed."""
    found = [line.split("|")[2:-1] for line in out.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for line in found for cell in line]


def test_the_table_has_the_last_values_the_best_and_the_cost(run, run_main):
    result = run_main(plot.main, run("one"))
    assert result.code == 0 and result.err == ""
    headings = [cell.strip() for cell in result.out.splitlines()[0].split("|")[2:-1]]
    assert dict(zip(headings, cells(result.out, "one"), strict=True)) == {
        "step": "5",
        "tokens": "500",
        "train loss": "3.0000",
        "validation loss": "4.7500",
        "bits/byte": "6.5000",
        "best validation": "4.5000 at 2",
        "time": "8 seconds",  # 3 × 2 s, the first step too, + 2 × 1 s
        "tokens/s": "62",
        "GB": "0.75",
    }


def test_the_picture_has_both_losses_over_tokens_and_over_time(run, run_main, figures):
    folder = run("one")
    assert f"written: {folder / 'overlay.png'}" in run_main(plot.main, folder).out
    over_tokens, over_time = curves(figures[-1])
    assert over_tokens == [[(100, 5), (300, 4), (500, 3)], [(200, 4.5), (500, 4.75)]]
    assert over_time == [[(2, 5), (6, 4), (8, 3)], [(4, 4.5), (8, 4.75)]]
    content = (folder / "overlay.png").read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24]) > (1000, 400)
    assert not list(folder.glob(".*.tmp"))


def test_a_key_is_drawn_alone_and_the_output_is_chosen(run, run_main, figures, tmp_path):
    result = run_main(plot.main, run("one"), run("two", ROWS[:1]), "--key=lr", f"--output={tmp_path / 'x.png'}")
    assert result.code == 0 and (tmp_path / "x.png").exists()
    assert curves(figures[-1])[0] == [[(100, 0.1), (300, 0.2), (500, 0.1)], [(100, 0.1)]]


def test_the_name_of_a_run_is_no_formula(run, run_main):
    folder = run(r"a$\fra{$")
    assert run_main(plot.main, str(folder)).code == 0
    assert (folder / "overlay.png").exists()


def test_the_name_of_a_run_that_the_font_lacks_is_drawn_without_a_warning(run, run_main, recwarn):
    folder = run("运行 🚀")
    assert run_main(plot.main, str(folder)).code == 0
    assert (folder / "overlay.png").exists() and not recwarn.list


def test_config_keys_that_differ_are_named_with_the_default_where_a_run_lacks_them(run, run_main):
    out = run_main(plot.main, run("one", seed=1), run("two", seed=2, n_head=3)).out
    assert cells(out, "seed") == ["1", "2"] and cells(out, "n_head") == ["12", "3"]
    assert not cells(out, "n_layer") and not cells(out, "out_dir")
    assert "| init_from " not in out and len(out.split("\n\n")) == 3  # finals, differences, the file


def test_unfinished_unvalidated_untimed_and_empty_runs(run, run_main, figures):
    unvalidated = [{"step": 1, "tokens": 100, "train_loss": 5.0}]
    cut_off = "".join(json.dumps(row) + "\n" for row in ROWS[:3]) + '{"step": 4, "tok'
    result = run_main(plot.main, run("begun", unvalidated), run("empty", ""), run("cut", cut_off), run("whole"))
    assert result.code == 0
    assert cells(result.out, "begun") == ["1 of 5", "100", "5.0000", *[""] * 6]
    assert cells(result.out, "empty")[0] == "no step is logged"
    assert cells(result.out, "cut")[0] == "3 of 5" and cells(result.out, "whole")[0] == "5"
    over_tokens, over_time = curves(figures[-1])
    assert len(over_tokens) == 5 and len(over_time) == 4  # train of three, validation of two; of one no time


def test_a_run_given_twice_counts_once_and_equal_names_become_paths(run, run_main):
    one, two = run("a/x", seed=1), run("b/x", seed=2)
    out = run_main(plot.main, one, two, one).out
    assert cells(out, one) and cells(out, two) and cells(out, "seed") == ["1", "2"]


def test_many_runs_differ_in_color_or_line(run, run_main, figures):
    run_main(plot.main, *(run(f"run{n}") for n in range(9)), "--key=val_loss")
    lines = figures[0].axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 9
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [f"run{n}" for n in range(9)]


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
