import math
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import flags, replace, rows, spy, tiny, words

import train
from nanoladder import checkpoint
from nanoladder.data import open_dataset
from nanoladder.data.counting import counted_losses
from nanoladder.run import clock as clocks
from nanoladder.run import metrics
from nanoladder.run.metrics import plot

KEYS = {
    *("step", "tokens", "train_loss", "val_loss", "val_bpb"),
    *("lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "peak_memory_gb"),
}


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), save_interval=0)


def test_rows_have_the_documented_keys(config):
    config = replace(config, max_steps=7, log_interval=2, eval_interval=3)
    train.train(config)
    found = {row["step"]: row for row in rows(config)}
    assert list(found) == [2, 3, 4, 6, 7]  # the last step ends every interval
    trained = {"step", "tokens", "train_loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "peak_memory_gb"}
    evaluated = {"step", "tokens", "val_loss", "val_bpb"}
    assert [set(row) for row in found.values()] == [
        *(trained, evaluated, trained),
        *(trained | evaluated, trained | evaluated),
    ]
    for step, row in found.items():
        assert set(row) <= KEYS and row["tokens"] == step * 4 * 16
        assert all(math.isfinite(value) and value > 0 for value in row.values())
        if "step_ms" in row:
            assert row["tokens_per_s"] * row["step_ms"] / 1e3 == pytest.approx(4 * 16)


def test_an_interval_of_0_means_never(config):
    train.train(replace(config, log_interval=0, eval_interval=0))
    assert rows(config) == []
    assert not list(Path(config.out_dir).glob("*.safetensors"))


def test_train_loss_is_the_mean_over_the_interval(config):
    train.train(config)
    each = [row["train_loss"] for row in rows(config)]
    other = replace(config, log_interval=4, out_dir=config.out_dir + "2")
    train.train(other)
    assert [row["train_loss"] for row in rows(other)] == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 2])


def test_loss_png_is_an_image(config, monkeypatch):
    monkeypatch.setattr(metrics, "plot", plot)
    train.train(replace(config, eval_interval=3))
    content = Path(config.out_dir, "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 500 and height > 200
    assert not list(Path(config.out_dir).glob("*.tmp"))


def test_counted_losses_stand_in_the_header_and_in_the_picture(config, monkeypatch, capsys):
    plotted = []
    monkeypatch.setattr(metrics, "plot", lambda rows, path, title, counted: plotted.append(counted))
    train.train(replace(config, eval_interval=3))
    dataset = open_dataset(config)
    losses = counted_losses(dataset, config)
    assert plotted == [losses]
    bits = losses["trigrams"] / math.log(2) * dataset.val.n_targets / dataset.meta["bytes"]["val"]
    assert f"trigrams {bits:.3f}, with copies " in " ".join(capsys.readouterr().out.split())
    train.train(replace(config, eval_interval=0, out_dir=f"{config.out_dir}2"))
    assert plotted == [losses, {}] and "trigrams" not in capsys.readouterr().out


def test_the_header_has_ten_lines_of_80_columns_and_each_other_line_as_many(
    config, dense, tmp_path, monkeypatch, capsys
):
    """However many keys differ from the defaults, and with samples in between."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(dense)
    keys = {"dataset": "data", "out_dir": "run", "max_steps": 60, "log_interval": 20, "eval_interval": 30}
    keys |= {"sample_interval": 60, "recipe": "smear", "loss_chunks": 1, "cuda_graph": True}
    train.main(flags(**keys))
    header, steps = capsys.readouterr().out.split("first step: ")
    assert max(map(len, [*header.splitlines(), *steps.splitlines()])) <= 80
    names = [line[:10].strip() for line in header.partition("\nbusy")[0].splitlines()]  # if others use the CPUs
    assert names == ["model", "run", "config", "", "", "", "device", "attention", "step", "data"]
    assert " … (config.json has all)\n" in header
    assert "step      compile: off; CUDA graph: off (CPU); logits and loss in 1 chunk\n" in header
    lines = [line for line in steps.splitlines() if not line.startswith("    ")][1:]  # without the text of the sample
    kinds = "step 20 loss, step 30 val, step 40 loss, step 60 sample, step 60 loss, step 60 val"
    assert ", ".join(" ".join(line.split()[:3]) for line in lines) == kinds


def test_a_log_line_has_room_for_the_largest_run():
    row = {"step": 600_000, "train_loss": 10.8249, "val_loss": 10.8249, "val_bpb": 4.7, "lr": 6e-4, "grad_norm": 12.34}
    row |= {"tokens_per_s": 9_999_999, "mfu": 0.41, "step_ms": 842.0, "peak_memory_gb": 139.0}
    training, evaluation = metrics.lines(row, 999_999)
    assert training == "step 600000  loss 10.8249  norm 12.34  9,999,999 tok/s  41% mfu  93.6 h left"
    assert evaluation == "step 600000  val  10.8249  bpb  4.7000  lr 6.0e-04  139.00 GB"
    assert metrics.lines({"step": 5, "val_loss": 1.0, "lr": 1.0}, 10) == ["step  5  val   1.0000  lr 1.0e+00"]
    training, *_ = metrics.lines(row | {"step": 999_000}, 999_999)
    assert training.endswith("  14.0 min left") and len(training) <= 80
    assert "left" not in metrics.lines(row, 600_000)[0]


@pytest.fixture
def time(monkeypatch):
    """A clock that advances only by time.now += seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: clock.now)
    return clock


def test_evaluating_and_saving_do_not_count_as_training(config, time, monkeypatch):
    for module, name, seconds in (
        (train, "train_step", 1.0),
        (train, "evaluate", 500.0),
        (checkpoint.save, "snapshot", 70.0),
    ):
        spy(monkeypatch, module, name, lambda *_, seconds=seconds, **__: setattr(time, "now", time.now + seconds))
    train.train(replace(config, log_interval=3, eval_interval=2, save_interval=2, max_steps=12))
    timed = [row["step_ms"] for row in rows(config) if "step_ms" in row]
    assert timed == [pytest.approx(1000)] * 4


def test_rows_that_could_not_be_written_are_present_at_the_end(config, monkeypatch, capsys):
    def log(self, row):
        self.path = self.folder / ("nowhere/x" if row["step"] == 3 else "metrics.jsonl")
        write(self, row)

    write = metrics.Metrics.write
    monkeypatch.setattr(metrics.Metrics, "write", log)
    train.train(config)
    assert "lacks step 3: [Errno 2]" in capsys.readouterr().err
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5, 6]


def test_curves_that_cannot_be_written_are_reported_and_the_exit_code_is_1(config, monkeypatch, run_main):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(metrics, "plot", fail)
    result = run_main(train.main, *words(config))
    assert result.code != 0 and "Traceback" not in result.err
    assert f"error: {config.out_dir} lacks rows of metrics.jsonl, or loss.png: no room" in f"{result.err}{result.code}"


NO_ROWS = ["{}", "[]", "3", '"step"', "null", '{"step": "1"}', '{"step": 1, "val_loss": NaN}', "[" * 10**5, "9" * 5000]
NO_ROWS += ['{"step": 1, "val_loss": "2"}', '{"step": 1, "val_loss": null}', '{"step": true}', '{"step": 1, "x": [2]}']


def test_lines_that_are_not_rows_are_named_and_left_out(config, run_main):
    train.train(replace(config, save_interval=100))
    path, before = Path(config.out_dir, "metrics.jsonl"), rows(config)
    path.write_text("\n".join([*NO_ROWS, path.read_text()]))
    result = run_main(train.main, *words(config, init_from="resume", max_steps=7, save_interval=100))
    assert result.code == 0 and f"{path} loses what is not a row of metrics: line 1, 2, 3, 4" in result.err
    assert rows(config)[:6] == before and rows(config)[6]["step"] == 7


def test_metrics_that_cannot_be_read_are_refused_before_anything_is_written(config, refused):
    train.train(replace(config, save_interval=100))
    folder = Path(config.out_dir)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    line = refused(train.main, *words(config, init_from="resume", max_steps=7))
    assert "metrics.jsonl is not a regular file" in line and "remove it" in line
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
