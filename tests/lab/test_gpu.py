"""lab/gpu.sh runs its parts one by one, goes on where it was, and says what is wrong."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

from lab import gpu, plan
from lab.results import read_results
from nanoladder.run import load_config

LADDER = gpu.parts()[1]


@dataclasses.dataclass(frozen=True)
class Planted(gpu.Part):
    """A part that runs some Python and has no results."""

    def command(self, folder, rehearse):
        return [sys.executable, "-c", f"import time, pathlib; folder = pathlib.Path({str(folder)!r}); {self.words[0]}"]


def planted(share=0.5, **parts):
    return [Planted(name, share, [code]) for name, code in parts.items()]


@pytest.mark.slow
def test_a_part_that_fails_or_runs_out_of_time_does_not_keep_the_others_from_running(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}])"
    slow = f"print('so far'); {start}; (folder / 'child').write_text(str(p.pid)); time.sleep(600)"
    lacking = "print('error: data/nowhere is not prepared'); raise SystemExit(2)"
    parts = [*planted(a="raise SystemExit('no luck')"), *planted(b=slow, share=0.005), *planted(c=lacking, d="1")]
    lines, wrong = gpu.measure(parts, tmp_path, 300, rehearse=False)
    state = json.loads((tmp_path / "state.json").read_text())
    assert [state[name].partition(":")[0] for name in "acd"] == ["failed", "skipped", "done"]
    assert state["b"] == "out of time; the same command continues" and "  so far" in lines
    assert wrong == ["a: failed: exit code 1; no luck"] and "c: skipped: error: data/nowhere is not prepared" in lines
    assert lines[-1] == "WRONG: a: failed: exit code 1; no luck"
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines
    with pytest.raises(ProcessLookupError):
        while True:  # what b has started: it is there until its new parent has waited for it
            os.kill(int((tmp_path / "child").read_text()), 0)
            time.sleep(0.1)
    assert (tmp_path / "b.log").read_text() == "so far\n"


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_what_is_not_is(tmp_path):
    count = "f = folder / '{0}'; f.write_text(f.read_text() + 'x' if f.exists() else 'x')"
    parts = planted(a=count.format("a"), b=count.format("b") + "; assert len(f.read_text()) > 1")
    assert gpu.measure(parts, tmp_path, 1000, rehearse=False)[1]
    assert not gpu.measure(parts, tmp_path, 1000, rehearse=False)[1]
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("x", "xx")


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("part", gpu.parts(), ids=lambda part: part.name)
def test_every_part_has_a_valid_command(part, rehearse, tmp_path):
    words = part.command(tmp_path, rehearse)[1:]
    if words[0] == "profile.py":
        options, config_words = plan.parse(words[1:])
        if options.mode != "tune":
            rows = plan.rows(options, config_words)
            reasons = plan.not_applicable(rows, options)
            assert all(reason.startswith(gpu.LEGITIMATE) for reason in reasons.values()), reasons
            assert len(rows) > len(reasons)
    elif words[0] == "train.py":
        load_config(words[1:])
    datasets = [word.partition("=")[2] for word in words if word.startswith("--dataset=")]
    assert set(datasets) <= gpu.DATASETS.keys() and bool(datasets) == (words[0] != "-m")


def test_without_a_gpu_it_says_so(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU here; expected one, or --rehearse" in refused(gpu.main)


@pytest.fixture
def summary(tmp_path):
    """summary(change=...) -> the summary of a ladder from results/, its rows changed by change(rows)."""
    stored = ROOT / "results/intel-xeon-2-threads-amx/reference/results.json"
    (tmp_path / LADDER.name).mkdir()

    def summarize(change=lambda rows: None):
        results = read_results(stored)
        change(results["modes"]["ladder"]["rows"])
        (tmp_path / LADDER.name / "results.json").write_text(json.dumps(results))
        return gpu.summary([LADDER], tmp_path, {LADDER.name: "done"})

    return summarize


def test_the_summary_says_what_was_found(summary):
    lines, wrong = summary()
    assert not wrong and lines[-1] == "nothing is wrong" and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for found in ("Intel Xeon, 2 threads, AMX; torch ", "matrix products float32 ", "The fastest step ("):
        assert found in text, text


def test_a_row_that_cannot_run_for_a_reason_is_none_and_another_and_other_losses_are(summary):
    assert not summary(lambda rows: [rows[name].update(note="error: out of memory") for name in ("naive", "amp")])[1]
    faults = [f"{LADDER.name}, flash: RuntimeError: CUDA error"]
    assert summary(lambda rows: rows["flash"].update(note="RuntimeError: CUDA error"))[1] == faults
    assert "flash: WRONG by " in summary(lambda rows: rows["flash"]["profile"][0].update(losses=[1.0] * 5))[1][0]


@pytest.mark.nightly
def test_a_rehearsal_reaches_its_end(dense, tmp_path):
    for source in [*ROOT.glob("*.py"), *(ROOT / name for name in ("config", "data", "nanoladder", "lab", "tests"))]:
        ignored = {"ignore": shutil.ignore_patterns("*.bin", "meta.json")} if source.is_dir() else {}
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / source.name, **ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(dense, tmp_path / "data/python_stdlib_byte", dirs_exist_ok=True)  # the others take minutes more
    command = ["bash", str(tmp_path / "lab/gpu.sh"), "--rehearse", "--minutes=30", "--out_dir=out/gpu"]
    result = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    state = json.loads((tmp_path / "out/gpu/state.json").read_text())
    for part in gpu.parts():
        here = "--dataset=python_stdlib_byte" in part.words and part.name not in ("tune", "peers")
        assert state[part.name] == "done" or (state[part.name].startswith("skipped") and not here)
    assert "nothing is wrong" in (tmp_path / "out/gpu/summary.txt").read_text()
