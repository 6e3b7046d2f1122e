"""profile.py measures what it says, and is not in the way of the standard library's module of that name."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from config import BadInput

spec = importlib.util.spec_from_file_location("nanoladder_profile", ROOT / "profile.py")
profile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(profile)

TINY_MODEL = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=16", "--batch_size=4", "--device=cpu"]


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import profile; print(profile.Profile, profile.run)"],
        ["-c", "import cProfile; cProfile.run('1 + 1')"],
        ["-m", "cProfile", "config/__init__.py"],
    ],
)
def test_the_standard_library_s_profile_is_what_others_import(command):
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_stage_is_measured_in_turns_and_an_interrupted_climb_goes_on(dense, tmp_path, monkeypatch, capsys):
    asked = []

    def measure(stage, what, steps, config_argv):
        asked.append((stage, what))
        if len(asked) == 4:
            raise KeyboardInterrupt
        if stage == "flash":
            raise RuntimeError("out of memory")
        if what == "losses":
            losses = [5.0, 4.25 if stage == "compile" else 4.0]
            return {"losses": losses, "tensor_bytes": 2_000_000_000, "reserved_bytes": None}
        seconds = {"naive": 0.100, "amp": 0.098, "compile": 0.050}[stage] + len(asked) * 1e-3
        return {"seconds": seconds, "first_step_seconds": 9, "resident_bytes": 3e9}

    monkeypatch.setattr(profile, "run_alone", measure)
    argv = [*TINY_MODEL, f"--dataset={dense}", f"--out_dir={tmp_path}"]
    argv += ["--stages=naive,amp,flash,compile", "--repeats=2"]
    with pytest.raises(KeyboardInterrupt):
        profile.main(argv)
    profile.main(argv)
    assert asked[:5] == [*((stage, "losses") for stage in ("naive", "amp", "flash", "compile")), ("compile", "losses")]
    assert asked[5:] == [("naive", "time"), ("amp", "time"), ("compile", "time")] * 2  # flash failed once and for all

    rows = [line.split("|")[1:-1] for line in (tmp_path / "table.md").read_text().splitlines()[4:]]
    naive, amp, flash, compiled = ([cell.strip() for cell in row] for row in rows)
    assert amp[2] == amp[3] == "no measurable change"  # 2 ms apart, with a spread of 3
    assert compiled[3] == "1.81×"  # (100 + 6.5) / (50 + 8.5), the added milliseconds of `asked`
    assert compiled[7] == "2.5e-01"
    assert flash[1] == "out of memory"
    assert naive[4:7] == ["2.000", "3.00", "4.0000"]
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert naive[0] in capsys.readouterr().out


def test_the_climb_goes_on_when_its_first_stage_fails(dense, tmp_path, monkeypatch):
    def measure(stage, what, *_):
        if stage == "naive":
            raise RuntimeError("out of memory")
        if what == "losses":
            return {"losses": [5.0], "tensor_bytes": 1, "reserved_bytes": None}
        return {"seconds": 1.0, "first_step_seconds": 9, "resident_bytes": None}

    monkeypatch.setattr(profile, "run_alone", measure)
    profile.main([*TINY_MODEL, f"--dataset={dense}", "--stages=naive,flash", f"--out_dir={tmp_path}"])
    naive, flash = (tmp_path / "table.md").read_text().splitlines()[4:]
    assert "out of memory" in naive
    assert "1000 ± 0" in flash


def test_results_of_other_conditions_are_not_mixed(dense, tmp_path, monkeypatch):
    row = {"losses": [1.0], "tensor_bytes": 1, "reserved_bytes": None}
    times = {"seconds": 1.0, "first_step_seconds": 1.0, "resident_bytes": 1}
    monkeypatch.setattr(profile, "run_alone", lambda stage, what, *_: row if what == "losses" else times)
    argv = [*TINY_MODEL, f"--dataset={dense}", "--stages=naive", f"--out_dir={tmp_path}"]
    profile.main(argv)
    with pytest.raises(BadInput, match="another steps"):
        profile.main([*argv, "--steps=9"])


@pytest.mark.parametrize("words", [["--stages=naive,flsh"], ["--repeats=0"], ["--steps=x"], ["--no_such_key=1"]])
def test_bad_options_are_refused_before_anything_is_measured(words, monkeypatch):
    monkeypatch.setattr(profile, "run_alone", lambda *_: pytest.fail("measured"))
    with pytest.raises(BadInput):
        profile.main(words)


@pytest.mark.parametrize("what", ["losses", "time"])
def test_one_process_measures_one_stage(dense, what):
    measured = profile.run_alone("set_to_none", what, 2, [*TINY_MODEL, f"--dataset={dense}"])
    if what == "losses":
        assert len(measured["losses"]) == profile.WARMUP + 2
        parameters = 17 * 32 + 16 * 32 + 12 * 32 * 32  # at least: tokens, positions, one block
        assert 4 * 4 * parameters < measured["tensor_bytes"] < 4_000_000  # weights, gradients and two averages
    else:
        assert 0 < measured["seconds"] < 1
        assert 0 < measured["resident_bytes"] < 1e9


def test_a_failing_process_says_why():
    with pytest.raises(RuntimeError, match="no train"):
        profile.run_alone("naive", "time", 1, ["--dataset=nowhere"])


def test_peak_tensor_bytes_counts_every_allocation_once():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = torch.ones(1000)
        torch.ones(5000)
        torch.ones(3000)
    assert profile.peak_tensor_bytes(profiler) == 4 * 6000
    assert len(kept) == 1000


def test_results_are_json_with_their_conditions(dense, tmp_path):
    profile.main(
        [*TINY_MODEL, f"--dataset={dense}", "--stages=naive", "--repeats=1", "--steps=1", f"--out_dir={tmp_path}"]
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["torch"] == torch.__version__
    assert len(results["stages"]["naive"]["losses"][0]["losses"]) == profile.WARMUP + 1
