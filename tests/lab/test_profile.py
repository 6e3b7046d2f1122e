"""profile.py measures the documented rows and does not shadow the standard library's module of the same name."""

import ast
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch
from conftest import ROOT, flags

from lab import climb, pages, plan, summary, tables
from lab.results import MEASURED_CODE, code_hash, read_results
from model import GPT
from nanoladder.config import TYPES, stage_names
from nanoladder.errors import BadInput
from nanoladder.run import load_config

OPTIMIZERS = get_args(TYPES["optimizer"])
TINY_MODEL = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=16", "--batch_size=4", "--device=cpu"]
EXAMINED = {
    "losses": [5.0, 4.0],
    "memory": {"weights": 4e8, "gradients": 4e8, "optimizer": 8e8, "activations": 3e8, "rest": 5e8, "peak": 2e9},
    "seconds_by_kind": {kind: 0.1 for kind in tables.KINDS if kind != "host"},
    "profiled_seconds": 1.0,
    "product_dtype": "float32",
    "parameters": 10**8,
    "flops_per_token": 6 * 10**8,
}
TIMED = {"seconds": 1.0, "first_step_seconds": 9.0, "resident_bytes": 3e9, "tokens": 64}
LIMITS = {"flops": {"float32": 1e12, "bfloat16": 2e12}, "copy_bytes": 1e10}
MACHINE = {"cpu": "a CPU", "threads": 4, "native_bfloat16": True, "gpu": None, "datasheet_flops": None, "torch": "2.13"}


@pytest.fixture
def copied(tmp_path):
    """A copy of this repository's code."""
    for source in [*ROOT.glob("*.py"), *(ROOT / name for name in ("config", "data", "nanoladder", "lab"))]:
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / source.name)
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """measured(answer) plants answer(measurement, words) in place of the processes. Returns the list of all calls."""
    asked = []

    def plant(answer):
        def run_alone(what, words, processes=1):
            if what in ("machine", "limits"):
                return MACHINE if what == "machine" else LIMITS
            asked.append((what, *words, processes))
            return answer(what, words)

        monkeypatch.setattr(climb, "run_alone", run_alone)
        return asked

    return plant


def value_of(key, words):
    """The last value that words give a key."""
    return [word.partition("=")[2] for word in words if word.startswith(f"--{key}=")][-1]


def usual(what, words):
    return EXAMINED if what == "examine" else TIMED


def only_the_machine(what, *_):
    return MACHINE if what == "machine" else pytest.fail("measured")


def stage_of(words):
    return next(word.partition("=")[2] for word in words if word.startswith("--stage="))


def rows_of(path):
    """{row: {column: cell}} of the first table in a table.md."""
    return rows_in(path.read_text())


def rows_in(text):
    """{row: {column: cell}} of the first table in a text."""
    lines = [line for line in text.split("\n\n")[2].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import profile; print(profile.Profile, profile.run)"],
        ["-c", "import cProfile; cProfile.run('1 + 1')"],
        ["-m", "cProfile", "nanoladder/config/__init__.py"],
    ],
)
def test_the_standard_library_s_profile_is_what_others_import(command):
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_stage_is_measured_in_turns_and_an_interrupted_climb_goes_on(dense, tmp_path, measured, capsys):
    def answer(what, words):
        stage = stage_of(words)
        if len(asked) == 4:
            raise KeyboardInterrupt
        if stage == "flash":
            raise RuntimeError("out of memory")
        if what == "examine":
            return EXAMINED | {"losses": [5.0, 4.25 if stage == "compile" else 4.0]}
        return TIMED | {"seconds": {"naive": 0.100, "amp": 0.0995, "compile": 0.050}[stage] + len(asked) * 1e-3}

    asked = measured(answer)
    argv = [*TINY_MODEL, f"--dataset={dense}", f"--out_dir={tmp_path}"]
    argv += ["--stages=naive,amp,flash,compile", "--repeats=2"]
    with pytest.raises(KeyboardInterrupt):
        climb.main(argv)
    climb.main(argv)
    order = [(what, stage_of(words)) for what, *words, _ in asked]
    assert order[:4] == [("examine", stage) for stage in ("naive", "amp", "flash", "compile")]
    assert order[4:6] == [("examine", "flash"), ("examine", "compile")]  # what failed, what was interrupted
    turn = [("time", "naive"), ("time", "amp"), ("time", "compile")]
    assert order[6:] == turn + turn[::-1]

    rows = rows_of(tmp_path / "table.md")
    assert rows["amp"]["against naive"] == rows["amp"]["against the stage before"] == "no measurable change"
    assert rows["compile"]["against naive"] == "1.84× (1.81–1.87)"  # 107 / 59 and 112 / 60 ms, with those of `asked`
    assert rows["compile"]["losses against naive"] == "WRONG by 0.25"
    assert rows["amp"]["losses against naive"] == "bit-equal"
    assert rows["naive"]["losses against naive"] == ""
    assert rows["flash"]["ms/step"] == "out of memory"
    assert rows["naive"]["tensors GB"] == "2.000"
    assert rows["naive"]["resident GB"] == "3.00"
    assert rows["naive"]["of the matmul rate"] == "35%"  # 64 tokens × 6e8 FLOP in 0.1095 s, of 1e12
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "no measurable change" in capsys.readouterr().out


def test_each_row_stands_beside_its_limit_on_a_machine_whose_launches_were_measured(dense, tmp_path, monkeypatch):
    timed = {"naive": 0.2, "compile": 0.3}  # slower than naive, which the limits do not have

    def run_alone(what, words, processes=1):
        found = {"machine": MACHINE, "limits": LIMITS | more, "examine": EXAMINED}
        return found[what] if what in found else TIMED | {"seconds": timed[stage_of(words)]}

    monkeypatch.setattr(climb, "run_alone", run_alone)
    argv = [*TINY_MODEL, f"--dataset={dense}", "--stages=compile", "--repeats=1"]
    more = {}  # as in older results
    climb.main([*argv, f"--out_dir={tmp_path / 'old'}"])
    assert "of the limit" not in (tmp_path / "old" / "table.md").read_text()

    more = {"cached_bytes": {"262144": 1e9}, "launch_seconds": 1e-4, "new_bytes": 1e9}
    climb.main([*argv, f"--out_dir={tmp_path / 'new'}"])
    rows, text = rows_of(tmp_path / "new" / "table.md"), (tmp_path / "new" / "table.md").read_text()
    for name, row in read_results(tmp_path / "new" / "results.json")["modes"]["ladder"]["rows"].items():
        if row.get("time"):
            limit = sum(row["limit"]["bounds"].values())
            assert limit == pytest.approx(sum(row["limit"]["kinds"].values()))
            assert rows[name]["least ms"] == tables.milliseconds(limit)
            assert rows[name]["of the limit"] == f"{limit / timed[name]:.0%}"
            assert rows[name]["bound by"].startswith("launches ")
    assert "The least time of each kind of work" in text


def test_the_climb_goes_on_without_its_first_stage_and_a_loss_that_is_no_number_is_wrong(dense, tmp_path, measured):
    def answer(what, words):
        if "--stage=naive" in words:
            raise RuntimeError("out of memory")
        losses = {"losses": [5.0, math.nan if "--stage=compile" in words else 4.0]} if what == "examine" else {}
        return usual(what, words) | losses

    measured(answer)
    climb.main([*TINY_MODEL, f"--dataset={dense}", "--stages=compile,flash,naive", f"--out_dir={tmp_path}"])
    rows = rows_of(tmp_path / "table.md")
    assert list(rows)[:3] == ["naive", "flash", "compile"]  # in the ladder's order
    assert "out of memory" in rows["naive"]["ms/step"]
    assert rows["flash"]["ms/step"] == "1000"
    assert rows["compile"]["losses against naive"] == "WRONG by inf"


def test_results_of_other_conditions_or_rows_are_not_mixed(dense, tmp_path, measured, monkeypatch):
    measured(usual)
    argv = [*TINY_MODEL, f"--dataset={dense}", f"--out_dir={tmp_path}"]
    climb.main([*argv, "--stages=naive"])
    for words, message in ((["--stages=naive", "--steps=9"], "another steps"), (["--stages=amp"], "other rows")):
        with pytest.raises(BadInput, match=message):
            climb.main([*argv, *words])
    monkeypatch.setattr(climb, "code_hash", lambda *_: "other")
    with pytest.raises(BadInput, match="another code"):
        climb.main([*argv, "--stages=naive"])


def test_a_change_of_the_code_that_is_measured_changes_its_hash_and_no_other_change_does(copied):
    hashes = [code_hash(copied)]
    assert hashes == [code_hash()]
    rooms = ("checkpoint", "config", "data", "machine", "optim", "parallel", "run")
    files = ("train.py", "model.py", "config/stages/06_amp.py", "nanoladder/files.py", "lab/measure.py")
    for name in (*files, "nanoladder/run/new.py", *(f"nanoladder/{room}/__init__.py" for room in rooms)):
        with open(copied / name, "a") as file:
            file.write("\n")
        hashes.append(code_hash(copied))
    assert len(set(hashes)) == len(hashes) == 14
    (copied / "docs").mkdir()
    for name in ("docs/measuring.md", "README.md", "amp.py", "lab/tables.py", "config/gpt2.py", "nanoladder/notes.txt"):
        (copied / name).write_text("changed")
    assert code_hash(copied) == hashes[-1]


def test_the_hash_covers_all_of_lab_that_measure_imports():
    covered = {path.stem for pattern in MEASURED_CODE for path in ROOT.glob(pattern) if path.parent == ROOT / "lab"}
    for name in covered:
        for node in ast.walk(ast.parse((ROOT / "lab" / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "lab":
                below = node.module.partition(".")[2]
                assert {below} if below else {alias.name for alias in node.names} <= covered


EXCHANGED = {"sent": {"all_reduce": [3, 4e6], "send": [1, 1e6]}, "peak": 2e9}


def test_scaling_starts_1_to_n_processes(dense, tmp_path, measured, monkeypatch):
    def answer(what, words):
        n = int(value_of("batch_size", words)) // 4
        assert "--threads=1" in words
        seconds = 1.25 if n > 1 and what == "time" else 1.0
        return EXCHANGED.copy() if what == "exchange" else TIMED | {"seconds": seconds, "tokens": 64 * n, "bytes": 4e6}

    asked = measured(answer)
    monkeypatch.setattr(climb, "predicted_peak", lambda *_: 1e9)
    words = ["--mode=scaling", "--processes=4", "--repeats=2"]
    climb.main([*TINY_MODEL, f"--dataset={dense}", f"--out_dir={tmp_path}", *words])
    assert [processes for *_, processes in asked] == [1, 2, 4, 1, 2, 2, 4, 4, 4, 4, 2, 2, 1]
    rows = rows_of(tmp_path / "table.md")
    assert rows["4"]["efficiency"] == "80%"
    assert rows["4"]["exposed communication ms"] == "250.0"
    assert rows["2"]["gradients MB"] == "4.0"
    assert rows["4"]["sent by a process MB"] == "7.0"  # 2 · 3/4 of the all_reduce
    assert rows["4"]["tensors GB"] == "2.000" and rows["4"]["predicted GB"] == "1.000"
    assert (tmp_path / "scaling.png").exists()


@pytest.mark.parametrize(
    "dimension, of_four, tokens, beyond",
    [
        ("shard", ["--batch_size=16", "--shard=full"], 256, "-600.0"),
        ("tensor", ["--tensor_parallel=4"], 64, "150.0"),
        ("context", ["--context_parallel=4"], 64, "150.0"),
        ("pipeline", ["--pipeline_parallel=4"], 64, "150.0"),
    ],
)
def test_scaling_along_a_dimension(dense, tmp_path, measured, monkeypatch, dimension, of_four, tokens, beyond):
    def answer(what, words):
        alone = of_four[0] not in words
        if what == "exchange":
            return EXCHANGED | ({"bubble": 0.25} if dimension == "pipeline" and not alone else {})
        return TIMED | ({"seconds": 1.0, "tokens": 64} if alone else {"seconds": 0.4, "tokens": tokens})

    asked = measured(answer)
    monkeypatch.setattr(climb, "predicted_peak", lambda *_: None)
    words = ["--mode=scaling", f"--dimension={dimension}", "--processes=4", "--repeats=1", "--n_layer=4", "--n_head=4"]
    climb.main([*TINY_MODEL, *words, "--micro_batch_size=1", f"--dataset={dense}", f"--out_dir={tmp_path}"])
    assert not any(what == "silent" for what, *_ in asked)
    assert set(of_four) <= set(next(call for call in asked if call[-1] == 4))
    rows = rows_of(tmp_path / "table.md")
    assert rows["4"]["beyond its share of one process's time ms"] == beyond
    assert rows["4"].get("bubble predicted") == ("25%" if dimension == "pipeline" else None)
    assert (tmp_path / f"scaling-{dimension}.png").exists()


@pytest.mark.slow
def test_two_processes_are_measured_for_real(dense):
    words = flags(dataset=dense, ddp=True, n_layer=1)
    vocab_size = json.loads((dense / "meta.json").read_text())["vocab_size"]
    weights = 4 * GPT(load_config([*words, f"--vocab_size={vocab_size}"])).n_params
    exchanged = climb.run_alone("exchange", [*words, "--threads=1"], processes=2)
    assert exchanged["sent"]["all_reduce"][1] == pytest.approx(weights, abs=100)  # and two scalars
    assert exchanged["peak"] > 4 * weights
    silent = climb.run_alone("silent", [*words, "--steps=1", "--threads=1"], processes=2)
    assert silent["seconds"] > 0 and silent["bytes"] == weights


REFUSED = {  # words: what the line says
    "--stages=naive,flsh": "did you mean 'flash'?",
    "--repeats=0": "expected a whole number of at least 1",
    "--steps=x": "expected a whole number of at least 1",
    "--mode=optimizers --train_steps=0": "expected a whole number",
    "--mode=optimizers --grid=1,x": "expected positive numbers",
    "--mode=optimizers --grid=0,1": "expected positive numbers",
    "--mode=optimizers --grid=inf": "expected positive numbers",
    "--mode=scaling": "such as --processes=2",
    "--mode=scaling --processes=1": "expected a whole number of at least 2",
    "--mode=scaling --processes=2 --dimension=model": "expected data, shard, tensor",
    "--no_such_key=1": "unknown key 'no_such_key'",
    "--modes=tune": "did you mean 'mode'?; --help lists every key",
    "--roudns=9": "did you mean 'rounds'?",
    "--out-dir=x": "did you mean 'out_dir'?",
    "--mode=all": "expected ladder, vary",
    "--mode=each": "expected ladder, vary",
    "--stage=amp": "--mode=ladder sets it",
    "--dataset=nowhere": "nowhere",
    "--vary attention": "expected stages, or KEY=a,b,c",
    "--vary attention=sdpa config/gpt2.py": "config/gpt2.py: expected stages, or KEY=a,b,c (config files come before",
    "--vary attn=sdpa": "unknown key 'attn'",
    "--vary attention=fast": "attention",
    "--vary attention=sdpa stages": "--vary=stages alone",
    "--mode=vary": "expected --vary KEY=a,b,c",
    "--mode=tune --vary=stages": "--vary: --mode=tune does not use it; expected --mode=vary, or no --vary",
    "--gpu=H100": "--gpu: --mode=ladder does not use it; expected --mode=predict, or no --gpu",
    "--mode=predict --memory_gb=-1": "expected a positive number",
    "--mode=predict --world_size=0": "expected a whole number",
    "--mode=predict --mfu=nan": "expected a fraction",
    "--mode=predict --mfu=40": "expected a fraction",
    "--mode=predict --vocab_size=50 --gpu=H1000": "no such device, did you mean 'H100'",
    "--mode=predict --vocab_size=50 --gpu=H100 --device=cpu": "expected --device=cuda",
    "--mode=predict --vocab_size=50 --gpu=H100 --device_file=x": "expected one of them",
    "--mode=predict --vocab_size=50 --device_file=nowhere": "cannot be read",
    "--mode=predict --vocab_size=50 --device=mps": "expected one of them",
    "--mode=predict --dataset=nowhere --device=cpu": "or, to predict without the data, --vocab_size=NUMBER",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_options_are_refused_before_anything_is_measured(words, monkeypatch, refused):
    monkeypatch.setattr(climb, "run_alone", only_the_machine)
    assert REFUSED[words] in refused(climb.main, *words.split())


def test_torchrun_is_refused(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "expected `python profile.py config/x.py --mode=scaling --processes=N`" in refused(climb.main)


@pytest.mark.parametrize("mode", plan.MODES)
def test_the_help_of_a_mode_has_its_own_options(mode, run_main):
    found = run_main(climb.main, f"--mode={mode}", "--help")
    assert found.code == 0 and plan.MODES[mode].meaning.split()[0] in found.out
    listed = set(re.findall(r"^  --(\w+)", found.out, re.MULTILINE))
    assert listed == {"mode", *plan.MODES[mode].options}


PREDICTED = ["--n_layer=1", "--n_head=2", "--n_embd=64", "--context_length=64", "--batch_size=8", "--vocab_size=512"]
PREDICTED += ["--mode=predict", "--compile=False"]


def figures_of(out):
    """{row: its cells} of the lines that --mode=predict prints."""
    lines = [line for line in out.splitlines() if line.startswith(("naive ", "flash ", "as configured "))]
    return {line[:13].strip(): line[13:].split() for line in lines}


def test_predict_says_why_a_stage_of_the_ladder_cannot_run_and_goes_on(capsys):
    argv = ["config/finetune_shakespeare.py", *PREDICTED, "--init_from=scratch", "--gpu=H100", "--optimizer=adafactor"]
    climb.main([*argv, "--stages=naive,shard"])
    out = capsys.readouterr().out
    assert "\nshard: optimizer=adafactor" in out and figures_of(out).keys() == {"naive", "as configured"}


def test_predict_prints_the_time_and_the_cost_of_a_run_on_a_gpu_that_is_not_there(drawn, tmp_path, capsys):
    argv = [*PREDICTED, "--gpu=a100", "--stages=flash", "--max_steps=3600", "--memory_gb=0.07"]
    climb.main([*argv, "--price_per_hour=1000", f"--out_dir={tmp_path}"])
    out = capsys.readouterr().out
    text = (tmp_path / "predict.md").read_text()
    assert "on 1 × A100 at 40% of 312 TFLOP/s, " in out.replace("\n ", "") and " at 1000 an hour" in out
    rows = figures_of(out)
    assert rows.keys() == {"naive", "flash", "as configured"} and max(map(len, out.splitlines()[:-1])) <= tables.WIDTH
    for peak, memory, least, speed, hours, cost, fits in rows.values():
        assert float(hours) == pytest.approx(float(least) / 1e3, rel=0.3)  # 3600 steps; least has one decimal
        assert float(cost) == pytest.approx(1e3 * float(hours), rel=0.06)
        assert float(peak) > 0.06 and memory.endswith("%") and speed.endswith("×") and fits.isdecimal()
    assert "Predicted memory of a step, GB" in text and "| fused ms |" in text.replace("  ", " ")
    assert (tmp_path / "predict.png").read_bytes().startswith(b"\x89PNG")
    title = " ".join(drawn["predict.png"].get_suptitle().split())
    assert title.startswith("predict: --n_layer=1 ") and title.endswith(" A100")


def test_predict_takes_this_machine_s_limits_or_those_of_a_file(tmp_path, monkeypatch, capsys):
    more = {"cached_bytes": {}, "launch_seconds": 1e-6, "new_bytes": 1e9}
    answers = {"machine": MACHINE, "limits": LIMITS | more}
    monkeypatch.setattr(climb, "run_alone", lambda what, words: answers[what])
    argv = [*PREDICTED, "--device=cpu", "--stages=naive", "--dtype=float32", f"--out_dir={tmp_path}"]
    climb.main(argv)
    assert "on 1 × a CPU, 4 threads, native bfloat16 at 40%" in capsys.readouterr().out.replace("\n ", "")
    assert "every operation at its limit (measured here: float32 1 TFLOP/s" in (tmp_path / "predict.md").read_text()
    (tmp_path / "x.json").write_text('{"name": "X1", "flops": {"float32": 1e9}, "bytes_per_s": 5, "launch_seconds": 1}')
    climb.main([*argv, f"--device_file={tmp_path / 'x.json'}"])
    assert "on 1 × X1 at 40% of 0.001 TFLOP/s" in capsys.readouterr().out.replace("\n ", "")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(dense, monkeypatch):
    monkeypatch.setattr(climb, "run_alone", only_the_machine)
    with pytest.raises(BadInput, match="cannot be written"):
        climb.main([*TINY_MODEL, f"--dataset={dense}", "--out_dir=/dev/null/x"])


def planned(*argv):
    options, words = plan.parse(list(argv))
    rows = plan.rows(options, words)
    return rows, plan.not_applicable(rows, options.mode)


def changed(config, base):
    return {key: value for key, value in vars(config).items() if value != getattr(base, key)}


def test_vary_has_a_row_for_every_combination_and_a_config_as_it_is():
    words = [*TINY_MODEL, "--attention=sdpa"]  # auto is another kernel on some machines
    rows, reasons = planned(*words, "--vary", "attention=matmul,sdpa", "compile=True,False")
    base = rows.pop("as configured")
    assert base == load_config(words) and list(reasons) == ["attention=sdpa, compile=True"]
    for name, config in rows.items():
        attention, compile = (word.partition("=")[2] for word in name.split(", "))
        assert config == dataclasses.replace(base, attention=attention, compile=compile == "True")
    assert len(rows) == 4
    _, reasons = planned(*TINY_MODEL, "--vary", "micro_batch_size=2,3", "--repeats=1")
    assert "micro_batch_size=3" in reasons["micro_batch_size=3"]  # which does not divide 4


def test_vary_stages_takes_out_each_stage_or_puts_it_in():
    rows, reasons = planned(*TINY_MODEL, "--vary=stages")
    finished = rows.pop("as configured")
    assert {"with checkpointing", "without amp", "without compile"} <= rows.keys()
    for name, config in rows.items():
        if name not in reasons:
            assert changed(config, finished).keys() == pages.fields(name.split()[1]).keys()
    rows, _ = planned(*TINY_MODEL, "--stage=naive", "--vary=stages")
    naive = rows.pop("as configured")
    assert list(rows) == [f"with {stage}" for stage in plan.stages_of(1)[1:]]
    for name, config in rows.items():
        stage = load_config([*TINY_MODEL, f"--stage={name.split()[1]}"])
        fields = pages.fields(name.split()[1])
        assert changed(config, naive) == {field: getattr(stage, field) for field in fields}
    assert set(stage_names()) - set(plan.stages_of(1)) >= {"ddp", "shard"} and plan.stages_of(2) == stage_names()


def test_the_ladder_ends_with_the_config_as_it_is_where_that_is_none_of_its_stages():
    finished = planned(*TINY_MODEL, "config/stages/00_naive.py", "--mode=ladder")[0]
    assert list(finished) == plan.stages_of(1)
    configs, reasons = planned("config/gpt2_low_memory.py", "--mode=ladder", "--stages=naive")
    assert list(configs) == ["naive", "as configured"] and not reasons
    assert configs["as configured"] == load_config(["config/gpt2_low_memory.py"])


def test_a_row_that_trains_otherwise_has_losses_of_its_own_unless_they_are_no_numbers(dense, tmp_path, measured):
    losses = {"sgd": [5.0, 4.5], "adafactor": [5.0, math.nan], "muon": [5.0, 4.0]}

    def answer(what, words):
        return usual(what, words) | {"losses": losses.get(value_of("optimizer", words), [5.0, 4.0])}

    measured(answer)
    argv = [*TINY_MODEL, f"--dataset={dense}", "--vary", "optimizer=sgd,adafactor", "compile=True", "--repeats=1"]
    climb.main([*argv, f"--out_dir={tmp_path}"])
    rows = rows_of(tmp_path / "table.md")
    assert rows["optimizer=sgd, compile=True"]["losses against as configured"] == "another update"
    assert rows["optimizer=adafactor, compile=True"]["losses against as configured"] == "WRONG by inf"
    assert (tmp_path / "vary-optimizer-compile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, first, optimizer, otherwise",
    [
        (["--compile=False", "--attention=matmul"], [], "muon", False),
        (["--optimizer=adamw8bit"], [], "adamw", False),
        (["--optimizer=sgd"], [], "adamw", True),
        (["--learning_rate=0.1"], [], "adamw", True),
        ([], ["--stage=naive", "--optimizer=adamw"], "muon", True),  # as configured, beside naive
        ([], ["--stage=naive"], "adafactor", True),
        (["--stage=amp", "--dtype=auto"], ["--stage=naive"], "adafactor", False),
        (["config/stages/00_naive.py", "--optimizer=sgd"], ["config/stages/00_naive.py"], "adamw", True),  # earlier
    ],
)
def test_what_trains_otherwise(words, first, optimizer, otherwise):
    assert summary.trains_otherwise(words, first, {"optimizer": optimizer}) == otherwise


def test_optimizers_are_rows_of_the_config_as_it_is_adamw_first():
    configs, _ = planned(*TINY_MODEL, "--mode=optimizers", "--micro_batch_size=2")
    base = load_config([*TINY_MODEL, "--micro_batch_size=2"])
    assert list(configs) == list(OPTIMIZERS)
    assert OPTIMIZERS[0] == "adamw"
    assert list(configs.values()) == [dataclasses.replace(base, optimizer=name) for name in OPTIMIZERS]


def test_a_run_has_its_schedule_within_its_steps():
    words = [*TINY_MODEL, "--learning_rate=1e-3", "--min_lr=1e-4", "--warmup_steps=50", "--lr_decay_steps=9"]
    options, config_argv = plan.parse([*words, "--mode=optimizers", "--train_steps=200", "--grid=3,0.5"])
    assert options.grid == [0.5, 3]
    config = plan.training_run(load_config(config_argv), options.train_steps, options.grid[0])
    assert (config.max_steps, config.warmup_steps, config.lr_decay_steps) == (200, 20, 0)
    assert (config.learning_rate, config.min_lr) == (5e-4, 5e-5)


def test_every_optimizer_trains_at_every_learning_rate_and_goes_on_where_it_was(dense, tmp_path, measured):
    losses = {  # by the power of 10 that the learning rate is multiplied by
        "adamw": {-1: 4.0, 0: 3.5, 1: 3.75},
        "sgd": dict.fromkeys([-1, 0, 1, -2, -3]),
        "adafactor": {-1: 3.25, 0: 3.5, 1: None, -2: 3.5},
        "lion": {-1: 4.5, 0: 4.25, 1: 3.625, 2: 3.5, 3: 3.25},
    }

    def answer(what, words):
        name = value_of("optimizer", words)
        if len(asked) == 12:
            raise KeyboardInterrupt
        if name not in losses:
            raise RuntimeError("not available")
        if what != "curve":
            return usual(what, words)
        learning_rate = float(value_of("learning_rate", words))
        val_loss = losses[name][round(math.log10(learning_rate / 1e-3))]
        return {"learning_rate": learning_rate, "tokens": [64, 128], "losses": [5.0, 4.0], "val_loss": val_loss}

    asked = measured(answer)
    argv = [*TINY_MODEL, f"--dataset={dense}", "--learning_rate=1e-3", f"--out_dir={tmp_path}", "--mode=optimizers"]
    argv += ["--grid=0.1,1,10", "--repeats=2"]
    with pytest.raises(KeyboardInterrupt):
        climb.main(argv)
    climb.main(argv)
    runs = [words for what, *words, _ in asked if what == "curve"]
    trained = [(value_of("optimizer", words), value_of("learning_rate", words)) for words in runs]
    assert trained[:4] == [("adamw", "0.0001"), ("adamw", "0.001"), ("adamw", "0.01"), ("sgd", "0.0001")]
    assert len(trained) == sum(map(len, losses.values())) + 1  # one was interrupted

    rows = rows_of(tmp_path / "table.md")
    assert rows["adamw"]["best learning rate"] == "0.001 (1×)"
    assert rows["adamw"]["validation loss"] == "3.5000"
    assert rows["adamw"]["against adamw"] == ""
    assert rows["adafactor"]["best learning rate"] == "0.0001 (0.1×)"
    assert rows["adafactor"]["against adamw"] == "-0.2500"
    assert rows["adafactor"]["at 10×"] == "diverged"
    assert rows["lion"]["best learning rate"] == "1 (1000×, edge)"
    assert rows["sgd"]["at 1×"] == "diverged"
    assert rows["sgd"]["validation loss"] == ""
    assert rows["sgd"]["state, bytes per parameter"] == "8"
    results = read_results(tmp_path / "results.json")
    [adafactor] = [row for row in summary.summarize(results, "optimizers") if row["name"] == "adafactor"]
    assert list(adafactor["curves"]) == [0.01, 0.1, 1, 10]  # as they are drawn
    assert rows["galore"]["best learning rate"] == "not available"
    assert "after 300 steps, 0.0192 million tokens" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "optimizers.png").read_bytes().startswith(b"\x89PNG")
    for other in ("--grid=1", "--train_steps=9"):
        with pytest.raises(BadInput, match=f"another {other.partition('=')[0]}"):
            climb.main([*argv, other])


@pytest.mark.parametrize(
    "grid, losses, more",
    [
        ([1, 3], [], []),
        ([0.5, 1, 4], [2, 1, 3], []),
        ([0.5, 1, 4], [3, 2, 1], [16]),
        ([0.5, 1, 4], [3, 2, 1, None], [16]),
        ([0.5, 1, 4], [3, 2, 1, 0.5], [16, 64]),
        ([0.5, 1, 4], [3, 2, 1, 0.5, 0.25], [16, 64]),
        ([0.5, 1, 4], [1, 2, None], [0.25]),
        ([1, 3], [1, 2], [0.333]),
        ([0.5, 1, 4], [None, None, None], [0.25]),
        ([1], [2], []),
    ],
)
def test_learning_rates_go_on_beyond_the_end_that_is_best(grid, losses, more):
    assert summary.factors(grid, losses) == grid + more


def test_a_stage_that_the_command_line_rules_out_is_a_row_that_says_so(dense, tmp_path, measured):
    asked = measured(usual)
    argv = [*TINY_MODEL, f"--dataset={dense}", "--dtype=float32", "--stages=tf32,amp", f"--out_dir={tmp_path}"]
    climb.main(argv)
    assert rows_of(tmp_path / "table.md")["amp"]["ms/step"].startswith("not applicable")
    assert not any("--stage=amp" in words for words in asked)


def test_a_step_is_one_micro_batch_unless_a_batch_size_is_given():
    large = ["--batch_size=480", "--micro_batch_size=16"]
    for more in ([], ["--vary=stages"]):
        assert plan.parse(["--micro_batch_size=16", *more])[1][-1] == "--batch_size=16"
    for mode in ("optimizers", "predict"):
        assert plan.parse([f"--mode={mode}", "--micro_batch_size=16"])[1] == ["--micro_batch_size=16"]
    assert plan.parse(["--mode=peers", "--micro_batch_size=16"])[0].given == ["--micro_batch_size=16"]  # as for tune
    assert plan.parse(large)[1] == large


def test_vary_attention_says_which_kernel_ran_and_why_one_cannot(dense, tmp_path, measured):
    def answer(what, words):
        if (kernel := value_of("attention", words)) == "cudnn":
            raise RuntimeError("error: attention=cudnn has no kernel for torch.float32")
        seconds = {"auto": 1.0, "efficient": 2.0}[kernel]
        return (
            EXAMINED | {"attention_kernel": f"{kernel} kernel"} if what == "examine" else TIMED | {"seconds": seconds}
        )

    measured(answer)
    climb.main([*TINY_MODEL, f"--dataset={dense}", "--vary", "attention=cudnn,efficient", f"--out_dir={tmp_path}"])
    found = rows_of(tmp_path / "table.md")
    assert list(found) == ["as configured", "attention=cudnn", "attention=efficient"]
    assert found["attention=cudnn"]["ms/step"] == "error: attention=cudnn has no kernel for torch.float32"
    assert found["attention=efficient"]["kernel"] == "efficient kernel"
    assert found["attention=efficient"]["speed"] == "0.50× (0.50–0.50)"


@pytest.mark.parametrize("mode", ["ladder", "judge", "tune", "peers"])
def test_a_device_that_reports_no_memory_is_refused_before_anything_is_measured(mode, dense, monkeypatch, refused):
    monkeypatch.setattr(climb, "choose_device", lambda _: torch.device("mps"))
    line = refused(climb.main, *TINY_MODEL, f"--dataset={dense}", f"--mode={mode}")
    assert "device=mps cannot be measured; expected --device=cpu" in line


def test_modes_share_a_folder(dense, tmp_path, measured):
    measured(usual)
    argv = [*TINY_MODEL, f"--dataset={dense}", f"--out_dir={tmp_path}"]
    for words in (["--stages=naive,flash"], ["--vary", "compile=False"]):
        climb.main([*argv, *words])
    results = read_results(tmp_path / "results.json")
    assert list(results["modes"]) == ["ladder", "vary-compile"]
    assert all((tmp_path / f"{mode}.png").exists() for mode in results["modes"])
    assert "| compile=False" in (tmp_path / "table.md").read_text()


def test_a_cell_is_empty_if_its_figure_was_not_measured_and_so_are_columns():
    rows = [{"name": "a", "note": None, "seconds": 1.0, "memory": {"peak": 1e9}}, {"name": "b", "note": None}]
    columns = {
        "s": lambda row: f"{row['seconds']:g}",
        "IQR": lambda row: f"{row['iqr']:g}",
        "GB": lambda row: f"{row['memory']['peak'] / 1e9:g}",
        "reserved": lambda row: f"{row['memory']['reserved']}",
    }
    first, _, *body = tables.markdown(columns, rows).splitlines()
    assert first.split() == ["|", "|", "s", "|", "GB", "|"]
    assert [line.split() for line in body] == [["|", "a", "|", "1", "|", "1", "|"], ["|", "b", "|", "|", "|"]]


def test_stored_results_still_have_their_tables():
    paths = list(ROOT.glob("results/*/*/results.json"))
    assert paths
    for path in paths:
        stored = read_results(path)
        for mode in stored["modes"]:
            written = rows_in(path.with_name("table.md").read_text().partition(f"## {mode}:")[2])
            again = rows_in(tables.table(stored, mode))
            assert [(row, cells["ms/step"]) for row, cells in again.items()] == [
                (row, cells["ms/step"]) for row, cells in written.items()
            ]


@pytest.mark.parametrize(
    "native, bfloat16, line",
    [
        (False, 0.5e9, "bfloat16 0.5 GFLOP/s (emulated); a copy 10 GB/s."),
        (False, 2e12, "bfloat16 2 TFLOP/s; a copy 10 GB/s."),
        (True, 0.5e12, "bfloat16 0.5 TFLOP/s; a copy 10 GB/s."),
    ],
)
def test_the_table_names_emulated_bfloat16(native, bfloat16, line):
    limits = [{"flops": {"float32": 1e12, "bfloat16": bfloat16}, "copy_bytes": 1e10}]
    assert tables.machine_limits(limits, native) == f"The machine itself: matrix products float32 1 TFLOP/s, {line}"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["examine", "time", "curve"])
def test_one_process_measures_one_row(dense, what):
    words = [*TINY_MODEL, f"--dataset={dense}", "--stage=set_to_none", "--steps=2", "--max_steps=60"]
    measured = climb.run_alone(what, words)
    if what == "examine":
        memory = measured["memory"]
        parameters = measured["parameters"]
        assert memory["weights"] >= memory["gradients"] == 4 * parameters
        assert memory["optimizer"] == 8 * parameters + 4 * 9  # two averages, and a step for each tensor
        held = memory["weights"] + memory["gradients"] + memory["optimizer"]
        assert held < memory["peak"] < held + 4_000_000
        assert 0 < sum(measured["seconds_by_kind"].values()) < measured["profiled_seconds"]
    elif what == "curve":
        assert len(measured["losses"]) == len(measured["tokens"]) == 30
        assert measured["losses"][-1] < measured["losses"][0] < 4
        assert measured["val_loss"] < measured["losses"][0]
    else:
        assert min(measured["seconds"], measured["first_step_seconds"]) > 0
        assert 0 < measured["resident_bytes"] < 1e9
        assert measured["tokens"] == 64


@pytest.mark.slow
def test_a_failing_process_says_why():
    with pytest.raises(RuntimeError, match="no train"):
        climb.run_alone("time", ["--dataset=nowhere"])


@pytest.mark.nightly
def test_a_planted_stage_that_is_slow_and_wrong_is_caught_on_both_counts(dense, copied):
    code = (copied / "train.py").read_text()
    start = "    optimizer.zero_grad(set_to_none=config.set_to_none)\n"
    assert code.count(start) == 1
    slow, wrong = "__import__('time').sleep(1)", "optimizer.param_groups[0]['lr'] *= 2"
    planted = f"    if config.set_to_none:\n        {slow}\n        {wrong}\n"
    (copied / "train.py").write_text(code.replace(start, start + planted))
    argv = [*TINY_MODEL, f"--dataset={dense}", "--stages=set_to_none", "--repeats=2", "--steps=1", "--trace"]
    command = [sys.executable, "profile.py", *argv, "--learning_rate=0.01", f"--out_dir={copied / 'out'}"]
    result = subprocess.run(command, cwd=copied, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = rows_of(copied / "out" / "table.md")
    assert float(rows["set_to_none"]["against naive"].partition("×")[0]) < 0.5
    assert rows["set_to_none"]["losses against naive"].startswith("WRONG by")
    assert (copied / "out/traces/naive/trace.json.gz").stat().st_size > 1000
    assert json.loads((copied / "out/results.json").read_text())["machine"]["torch"] == torch.__version__
