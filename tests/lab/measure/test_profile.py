"""profile.py measures the documented rows and does not shadow the standard library's module of the same name."""

import dataclasses
import functools
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import MACHINE, ROOT, FakeTurns

from lab.measure import cli, measurements, modes, tables, turns
from lab.measure.configs import changes_from, not_applicable, rows_of, stages_of
from lab.measure.results import code_hash, read_results
from lab.measure.runs import RUNS
from lab.predict import predict
from lab.predict.roofline import Time
from nanoladder.config import stage_names, stages
from nanoladder.errors import BadInput
from nanoladder.run import load_config

DTYPES = "bfloat16", "float32"
TINY_MODEL = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=16", "--batch_size=4", "--device=cpu"]
PROFILED = {
    "losses": [5.0, 4.0],
    "memory": {"weights": 4e8, "gradients": 4e8, "optimizer": 8e8, "activations": 3e8, "rest": 5e8, "peak": 2e9},
    "seconds_by_kind": {kind: 0.1 for kind in tables.KINDS if kind != "host"},
    "profiled_seconds": 1.0,
    "product_dtype": "float32",
    "parameters": 10**8,
    "flops_per_token": 6 * 10**8,
}
TIMED = {"seconds": 1.0, "first_step_seconds": 9.0, "resident_bytes": 3e9, "tokens": 64}
EXCHANGED = {"sent": {"all_reduce": [3, 4e6], "send": [1, 1e6]}, "peak": 2e9}
LIMITS = {"flops": {"float32": 1e12, "bfloat16": 2e12}, "copy_bytes": 1e10, "cached_bytes": {"262144": 1e9}}
LIMITS |= {"launch_seconds": 1e-4, "new_bytes": 1e9}
PREDICT_TIME = predict.predict_time


@pytest.fixture
def measured(monkeypatch, dense, tmp_path):
    """measured(answer, *words) -> all calls so far, and the table; answer(measurement, config) fakes processes."""
    asked = []

    def run_together(function, config, n=1, folder=None, **options):
        what = next(name for name in measurements.MEASUREMENTS if measurements.MEASUREMENTS[name] is function)
        if what in ("machine", "limits", "free"):
            return [{"machine": MACHINE, "limits": LIMITS, "free": 1e12}[what]]
        asked.append((what, config, n, options))
        return [dict(run.answer(what, config))]

    class Processes(FakeTurns):
        def __init__(self, function, config, n=1, live=False, **options):
            super().__init__()
            assert function is measurements.time_steps and live
            self.given = config, n, options

        def figures(self):
            asked.append(("time", *self.given))
            return dict(run.answer("time", self.given[0]))

    def run(answer, *words):
        run.answer = answer
        modes.main([*TINY_MODEL, f"--dataset={dense}", f"--out_dir={tmp_path}", *words])
        return asked, rows_in((tmp_path / "table.md").read_text())

    monkeypatch.setattr(modes, "run_together", run_together)
    monkeypatch.setattr(modes, "Processes", Processes)
    monkeypatch.setattr(modes, "run_alone", lambda *args, **options: run_together(*args, **options)[0])
    monkeypatch.setattr(modes.predict, "predict_memory", lambda *_: SimpleNamespace(peak=1e9))
    monkeypatch.setattr(modes.predict, "predict_time", lambda *_: Time({"compute": 1e-3}))
    return run


@functools.cache
def at_stages(batch_size):
    return {name: load_config([f"--batch_size={batch_size}", f"--stage={name}"]) for name in stage_names()}


def stage_of(config):
    """Name of the stage at which the ladder's fields have the values of a config."""
    configs, fields = at_stages(config.batch_size), stages.fields("naive").keys()
    return next(name for name in configs if not changes_from(configs[name], config).keys() & fields)


def usual(what, config):
    return {"profile": PROFILED, "time": TIMED, "exchange": EXCHANGED}[what]


def rows_in(text):
    """{row: {column: cell}} of the first table in a text."""
    lines = [line for line in text.split("\n\n")[2].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


@pytest.mark.slow
def test_the_standard_library_s_profile_is_what_others_import():
    code = "import profile, cProfile; cProfile.run('1 + 1'); print(profile.Profile, profile.run)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -- the rows


def planned(*argv):
    options, words = cli.parse(list(argv))
    rows = rows_of(options, words)
    return rows, not_applicable(rows, options)


def test_vary_has_a_row_for_every_combination_and_a_config_as_it_is():
    words = [*TINY_MODEL, "--attention=sdpa"]  # auto is another kernel on some machines
    rows, reasons = planned(*words, "--vary", "attention=matmul,sdpa", "compile=True,False")
    base = rows.pop("as configured")
    assert base == load_config(words) and list(reasons) == ["attention=sdpa, compile=True"]
    for name, config in rows.items():
        attention, compile = (word.partition("=")[2] for word in name.split(", "))
        assert config == dataclasses.replace(base, attention=attention, compile=compile == "True")
    assert len(rows) == 4
    _, reasons = planned(*TINY_MODEL, "--vary", "micro_batch_size=2,3")
    assert "micro_batch_size=3" in reasons["micro_batch_size=3"]  # which does not divide 4
    half = {dtype: planned(*TINY_MODEL, f"--dtype={dtype}", "--vary", "half_residual=True")[1] for dtype in DTYPES}
    assert half["bfloat16"] == {} and "not applicable" in half["float32"]["half_residual=True"]


def test_a_config_file_computes_with_a_varied_key(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("n_embd = 16 * n_layer")
    rows, _ = planned(str(path), "--n_head=2", "--device=cpu", "--vary", "n_layer=2,3")
    assert [rows[f"n_layer={n}"].n_embd for n in (2, 3)] == [32, 48]


def test_vary_stages_takes_out_each_stage_or_puts_it_in():
    rows, reasons = planned(*TINY_MODEL, "--vary=stages")
    finished = rows.pop("as configured")
    assert {"with checkpointing", "without amp", "without compile"} <= rows.keys()
    for name, config in rows.items():
        if name not in reasons:
            assert changes_from(config, finished).keys() == stages.fields(name.split()[1]).keys()
    rows, _ = planned(*TINY_MODEL, "--stage=naive", "--vary=stages")
    naive = rows.pop("as configured")
    assert list(rows) == [f"with {stage}" for stage in stages_of(1)[1:]]
    for name, config in rows.items():
        stage, fields = load_config([*TINY_MODEL, f"--stage={name.split()[1]}"]), stages.fields(name.split()[1])
        assert changes_from(config, naive) == {field: getattr(stage, field) for field in fields}
    assert set(stage_names()) - set(stages_of(1)) >= {"ddp", "shard"} and stages_of(2) == stage_names()


def test_the_ladder_ends_with_the_config_as_it_is_if_that_is_none_of_its_stages():
    assert list(planned(*TINY_MODEL, "config/stages/00_naive.py", "--mode=ladder")[0]) == stages_of(1)
    configs, reasons = planned("config/gpt2_low_memory.py", "--mode=ladder", "--stages=naive")
    assert list(configs) == ["naive", "as configured"] and not reasons
    assert configs["as configured"] == load_config(["config/gpt2_low_memory.py"])


@pytest.mark.parametrize(
    "dimension, of_four",
    [
        ("data", {"batch_size": 16}),
        ("shard", {"batch_size": 16, "shard": "full"}),
        *((name, {f"{name}_parallel": 4}) for name in ("tensor", "context", "pipeline")),
    ],
)
def test_scaling_has_a_row_for_1_to_n_processes(dimension, of_four):
    words = [*TINY_MODEL, "--n_layer=4", "--n_head=4", "--micro_batch_size=1", "--batch_size=4"]
    rows, reasons = planned(*words, "--mode=scaling", "--processes=4", f"--dimension={dimension}")
    assert list(rows) == ["1", "2", "4"] and not reasons
    assert changes_from(rows["4"], load_config(words)) == of_four


def test_a_step_is_one_micro_batch_unless_a_batch_size_is_given():
    for more in ([], ["--vary=stages"]):
        assert cli.parse(["--micro_batch_size=16", *more])[1][-1] == "--batch_size=16"
    for words in (["--train", "--vary=stages"], ["--mode=predict"], ["--batch_size=480"]):
        assert cli.parse([*words, "--micro_batch_size=16"])[1][-1] == "--micro_batch_size=16"


# -- measuring, with fake processes


def test_every_stage_is_measured_in_turns_and_an_interrupted_measurement_goes_on(measured, tmp_path, capsys):
    def answer(what, config):
        asked.append((what, stage_of(config)))
        if len(asked) == 4:
            raise KeyboardInterrupt
        if stage_of(config) == "flash":
            raise RuntimeError("out of memory")
        if what == "profile":
            return PROFILED | {"losses": [5.0, 4.25 if stage_of(config) == "compile" else 4.0]}
        return TIMED | {
            "seconds": {"naive": 0.100, "amp": 0.0995, "compile": 0.050}[stage_of(config)] + len(asked) * 1e-3
        }

    asked, words = [], ["--stages=naive,amp,flash,compile", "--minutes=0.001"]
    with pytest.raises(KeyboardInterrupt):
        measured(answer, *words)
    _, rows = measured(answer, *words)
    assert asked[:4] == [("profile", stage) for stage in ("naive", "amp", "flash", "compile")]
    assert asked[4:6] == [("profile", "flash"), ("profile", "compile")]  # what failed, what was interrupted
    turn = [("time", "naive"), ("time", "amp"), ("time", "compile")]
    assert asked[6:] == turns.ROUNDS * turn

    assert rows["amp"]["against naive"] == rows["amp"]["against the stage before"] == "≈ 1 (0.93–1.07)"
    assert rows["compile"]["against naive"] == "1.74× (1.62–1.87)"  # 107 / 59 to 119 / 71 ms, with `asked`
    assert rows["compile"]["losses against naive"] == "WRONG by 0.25"
    assert rows["amp"]["losses against naive"] == "bit-equal"
    assert rows["flash"]["ms/step"] == "out of memory"
    assert rows["naive"]["tensors GB"] == "2.000" and rows["naive"]["resident GB"] == "3.00"
    assert rows["naive"]["of the matmul rate"] == "34%"  # 64 tokens × 6e8 FLOP in 0.112 s, of 1e12
    out = capsys.readouterr().out
    assert "WRONG: the losses of compile are not naive's." in out and "≈ 1: no measurable change" in " ".join(
        out.split()
    )
    assert max(map(len, out.partition("written:")[0].splitlines())) <= tables.WIDTH


def test_the_table_of_an_interrupted_measurement_has_the_finished_rounds(measured, tmp_path):
    def answer(what, config):
        asked.append(what)
        if asked.count("time") == 4:  # in the second round of two rows
            raise KeyboardInterrupt
        return usual(what, config)

    asked = []
    with pytest.raises(KeyboardInterrupt):
        measured(answer, "--stages=naive,flash", "--minutes=0.001")
    assert rows_in((tmp_path / "table.md").read_text())["flash"]["ms/step"] == "1000"


def test_one_slow_process_of_naive_hides_no_gain(measured):
    def answer(what, config):
        if what == "profile":
            return PROFILED
        asked.append(stage_of(config))
        pace = {"naive": 0.25, "allocator": 0.19, "flash": 0.18}[stage_of(config)] * (1 + len(asked) % 4 / 100)
        return TIMED | {"seconds": pace * (1.3 if asked == ["naive"] else 1)}

    asked = []
    _, rows = measured(answer, "--stages=naive,allocator,flash", "--minutes=0.001")
    assert re.fullmatch(r"1\.3\d× \(1\.[12]\d–1\.[34]\d\)", rows["allocator"]["against naive"])
    assert re.match(r"1\.[34]\d× \(", rows["flash"]["against naive"])
    assert rows["flash"]["against the stage before"].startswith("≈ 1 (")


def test_each_row_stands_beside_its_limit(measured, tmp_path, monkeypatch):
    timed = {"naive": 0.2, "compile": 0.3}  # slower than naive, unlike the limits
    monkeypatch.setattr(modes.predict, "predict_time", PREDICT_TIME)
    _, rows = measured(
        lambda what, config: PROFILED if what == "profile" else TIMED | {"seconds": timed[stage_of(config)]},
        "--stages=compile",
        "--minutes=0.001",
    )
    for name, row in read_results(tmp_path / RUNS)["modes"]["ladder"]["rows"].items():
        if row.get("time"):
            limit = sum(row["predicted"][0]["bounds"].values())
            assert rows[name]["least ms"] == tables.milliseconds(limit)
            assert rows[name]["of the limit"] == f"{limit / timed[name]:.0%}"
            assert rows[name]["bound by"].startswith("launches ")


def test_measuring_continues_without_the_first_stage_and_a_loss_that_is_nan_is_wrong(measured):
    def answer(what, config):
        if stage_of(config) == "naive":
            raise RuntimeError("out of memory")
        losses = {"losses": [5.0, math.nan if stage_of(config) == "compile" else 4.0]}
        return usual(what, config) | losses

    _, rows = measured(answer, "--stages=compile,flash,naive")
    assert list(rows)[:3] == ["naive", "flash", "compile"]  # in the ladder's order
    assert "out of memory" in rows["naive"]["ms/step"]
    assert rows["flash"]["ms/step"] == "1000"
    assert rows["compile"]["losses against naive"] == "WRONG by inf"


def test_results_of_other_conditions_or_rows_are_not_mixed_and_modes_share_a_folder(measured, tmp_path, monkeypatch):
    measured(usual, "--stages=naive")
    for words, message in ((["--stages=naive", "--seed=9"], "another config"), (["--stages=amp"], "other rows")):
        with pytest.raises(BadInput, match=message):
            measured(usual, *words)
    measured(usual, "--vary", "compile=False")
    assert list(read_results(tmp_path / RUNS)["modes"]) == ["ladder", "vary-compile"]
    monkeypatch.setattr(modes, "code_hash", lambda *_: "other")
    with pytest.raises(BadInput, match="another code"):
        measured(usual, "--stages=naive")


def test_scaling_starts_1_to_n_processes(measured, tmp_path):
    def answer(what, config):
        n = config.batch_size // 4
        if what == "exchange":
            return EXCHANGED | {"bubble": 0.25}
        return TIMED | {"seconds": 1.0 if n == 1 else 1.25, "tokens": 64 * n}

    asked, rows = measured(answer, "--mode=scaling", "--processes=4")
    assert [n for _, _, n, _ in asked] == [1, 2, 4] * (1 + turns.ROUNDS)
    assert all(options["threads"] == 1 for *_, options in asked)
    assert rows["4"]["efficiency"] == "80%"
    assert rows["4"]["sent by a process MB"] == "7.0"  # 2 · 3/4 of the all_reduce
    assert rows["4"]["tensors GB"] == "2.000"
    assert rows["1"]["predicted GB"] == "1.000" and not rows["4"]["predicted GB"]  # gloo's threads keep messages
    assert rows["4"]["bubble predicted"] == "25%"


def test_a_row_that_trains_differently_may_have_other_losses_unless_they_are_nan(measured):
    losses = {"sgd": [5.0, 4.5], "adamw8bit": [5.0, 4.5], "adafactor": [5.0, math.nan]}
    _, rows = measured(
        lambda what, config: usual(what, config) | {"losses": losses.get(config.optimizer, [5.0, 4.0])},
        *("--vary", "optimizer=sgd,adamw8bit,adafactor", "attention=matmul", "--minutes=0.001"),
    )
    for optimizer, found in {"sgd": "another update", "adamw8bit": "WRONG by 0.5", "adafactor": "WRONG by inf"}.items():
        assert rows[f"optimizer={optimizer}, attention=matmul"]["losses against as configured"] == found


def test_whole_runs_are_compared_by_their_losses(measured, capsys):
    losses = {"adamw": 4.0, "sgd": 3.5, "muon": None}

    def answer(what, config):
        if config.optimizer not in losses:
            raise RuntimeError("not available")
        return {"learning_rate": config.learning_rate, "val_loss": losses[config.optimizer]}

    asked, rows = measured(answer, "--train", "--vary", "optimizer=sgd,muon,galore", "--learning_rate=1e-3")
    assert [what for what, *_ in asked] == ["curve"] * 4
    expected = {"validation loss": "3.5000", "against as configured": "-0.5000", "learning rate": "0.001"}
    assert rows["optimizer=sgd"] == {"": "optimizer=sgd"} | expected
    assert rows["optimizer=muon"]["validation loss"] == "diverged"
    assert rows["optimizer=galore"]["validation loss"] == "not available"
    assert "Lowest validation loss: 3.5000, optimizer=sgd." in capsys.readouterr().out


# -- predicting


PREDICTED = ["--n_layer=1", "--n_head=2", "--n_embd=64", "--context_length=64", "--batch_size=8", "--vocab_size=512"]
PREDICTED += ["--mode=predict", "--compile=False"]


def figures_of(out):
    """{row: its cells} of the lines that --mode=predict prints."""
    lines = [re.split("  +", line) for line in out.splitlines()]
    return {name: cells for name, *cells in lines if len(cells) > 1 and name}


def test_predict_prints_the_time_and_the_cost_of_a_run_on_a_gpu_that_is_not_there(tmp_path, capsys):
    argv = [*PREDICTED, "--gpu=a100", "--stages=flash", "--max_steps=3600", "--memory_gb=0.07"]
    modes.main([*argv, "--price_per_hour=1000", f"--out_dir={tmp_path}"])
    out = capsys.readouterr().out
    assert "on 1 × A100 at 40% of 312 TFLOP/s, " in out.replace("\n ", "") and " at 1000 an hour" in out
    rows = figures_of(out)
    assert rows.keys() == {"naive", "flash", "as configured"} and max(map(len, out.splitlines()[:-1])) <= tables.WIDTH
    for peak, memory, least, speed, hours, cost, fits in rows.values():
        assert float(hours) == pytest.approx(float(least) / 1e3, rel=0.3)  # 3600 steps; least has one decimal
        assert float(cost) == pytest.approx(1e3 * float(hours), rel=0.06)
        assert float(peak) > 0.06 and memory.endswith("%") and speed.endswith("×") and fits.isdecimal()
    text = (tmp_path / "predict.md").read_text()
    assert "weights" in text and "| bound by " in text.replace("  ", " ")


def test_predict_has_a_row_for_each_varied_value(tmp_path, capsys):
    modes.main([*PREDICTED, "--gpu=H100", "--vary", "n_layer=2,4", f"--out_dir={tmp_path}"])
    rows = figures_of(capsys.readouterr().out)
    assert rows.keys() == {"as configured", "n_layer=2", "n_layer=4"}
    parameters, tokens = zip(*((float(row[0].rstrip("M")), row[1]) for row in rows.values()), strict=True)
    assert sorted(parameters) == list(parameters) and parameters[0] < parameters[-1] and len({*tokens}) == 1


def test_predict_takes_this_machine_s_limits(tmp_path, monkeypatch, capsys):
    answers = {"machine_facts": MACHINE, "machine_limits": LIMITS}
    monkeypatch.setattr(modes, "run_alone", lambda what, config: answers[what.__name__])
    words = ["--device=cpu", "--stages=naive,shard", "--dtype=float32", "--optimizer=adafactor"]
    modes.main([*PREDICTED, *words, f"--out_dir={tmp_path}"])
    out = capsys.readouterr().out
    assert "on 1 × a CPU, 4 threads, native bfloat16 at 40%" in out.replace("\n ", "")
    assert "\nshard: optimizer=adafactor" in out and figures_of(out).keys() == {"naive", "as configured"}
    assert "is at its limit (measured here: float32 1 TFLOP/s" in (tmp_path / "predict.md").read_text()


# -- tables


@pytest.mark.parametrize("mode", cli.MODES)
def test_the_help_of_a_mode_has_its_own_options(mode, run_main):
    found = run_main(modes.main, f"--mode={mode}", "--help")
    assert found.code == 0 and cli.MODES[mode].meaning.split()[0] in found.out
    listed = set(re.findall(r"^  --(\w+)", found.out, re.MULTILINE))
    assert max(map(len, found.out.splitlines())) <= 80
    assert listed == {"mode", *cli.MODES[mode].options}


# -- for real


@pytest.mark.nightly
def test_a_planted_stage_that_is_slow_and_wrong_is_caught_on_both_counts(dense, tmp_path):
    for source in [*ROOT.glob("*.py"), *(ROOT / name for name in ("config", "data", "operators", "nanoladder", "lab"))]:
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / source.name)
    assert code_hash(tmp_path) == code_hash()
    code = (tmp_path / "train.py").read_text()
    start = "    optimizer.zero_grad(set_to_none=config.set_to_none)\n"
    assert code.count(start) == 1
    slow, wrong = "__import__('time').sleep(1)", "optimizer.param_groups[0]['lr'] *= 2"
    planted = f"    if config.set_to_none:\n        {slow}\n        {wrong}\n"
    (tmp_path / "train.py").write_text(code.replace(start, start + planted))
    assert code_hash(tmp_path) != code_hash()
    argv = [*TINY_MODEL, f"--dataset={dense}", "--stages=set_to_none", "--minutes=0.5"]
    command = [sys.executable, "profile.py", *argv, "--learning_rate=0.01", f"--out_dir={tmp_path / 'out'}"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # two threads beside other tests may wait for each other for seconds
    result = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = rows_in((tmp_path / "out" / "table.md").read_text())
    assert float(rows["set_to_none"]["against naive"].partition("×")[0]) < 0.5
    assert rows["set_to_none"]["losses against naive"].startswith("WRONG by")
    assert read_results(tmp_path / "out" / RUNS)["machine"]["torch"] == torch.__version__
