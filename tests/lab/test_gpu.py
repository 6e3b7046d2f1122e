"""lab/gpu.sh runs its parts one by one, resumes where it stopped, and reports what is wrong."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

from lab import gpu
from lab.measure import cli
from lab.measure.configs import not_applicable, rows_of
from lab.measure.results import read_results, table_of, write
from lab.measure.runs import RUNS, read
from nanoladder.run import load_config


def planted(folder, **parts):
    """Parts that run some Python and have no results."""
    before = f"import time, pathlib; folder = pathlib.Path({str(folder)!r}); "
    return {name: ["-c", before + code] for name, code in parts.items()}


@pytest.mark.slow
def test_a_part_that_fails_or_runs_out_of_time_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}])"
    slow = f"print('so far'); {start}; (folder / 'child').write_text(str(p.pid)); time.sleep(600)"
    lacking = "print('error: data/nowhere is not prepared'); raise SystemExit(2)"
    parts = planted(tmp_path, a="raise SystemExit('no luck')", b=slow, c=lacking, d="print('ours')")
    state = gpu.measure(parts, tmp_path, 10)
    assert state == {
        "a": "failed: exit code 1; no luck",
        "b": "out of time; the same command continues",
        "c": "skipped: error: data/nowhere is not prepared",
        "d": "done",
    }
    assert gpu.faults(tmp_path, state) == ["a: failed: exit code 1; no luck"]
    assert "d …\nours\nd: done\n" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        while True:  # the child of b exists until its new parent has reaped it
            os.kill(int((tmp_path / "child").read_text()), 0)
            time.sleep(0.1)
    assert (tmp_path / "b.log").read_text() == "so far\n"


@pytest.mark.slow
def test_finished_parts_are_skipped_and_unfinished_ones_run_again(tmp_path):
    count = "f = folder / '{0}'; f.write_text(f.read_text() + 'x' if f.exists() else 'x')"
    parts = planted(tmp_path, a=count.format("a"), b=count.format("b") + "; assert len(f.read_text()) > 1")
    assert gpu.measure(parts, tmp_path, 1000)["b"].startswith("failed")
    assert gpu.measure(parts, tmp_path, 1000) == {"a": "done", "b": "done"}
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("x", "xx")


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("part", gpu.parts())
def test_every_part_has_a_valid_command(part, rehearse):
    words = gpu.rehearsal(gpu.parts()[part]) if rehearse else gpu.parts()[part]
    if words[0] == "profile.py":
        options, config_words = cli.parse(words[1:])
        rows = rows_of(options, config_words)
        reasons = not_applicable(rows, options)
        assert all(reason.startswith("not applicable") for reason in reasons.values()), reasons
        assert len(rows) > len(reasons)
    elif words[0] == "train.py":
        load_config(words[1:])
    datasets = [word.partition("=")[2] for word in words if word.startswith("--dataset=")]
    prepared = {"python_stdlib", "python_stdlib_byte", "python_stdlib_bpe50257", "shakespeare_char"}  # by docs/gpu.md
    assert set(datasets) <= prepared and bool(datasets) == (words[0] != "-m")


def test_without_a_gpu_it_says_so(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU here; expected one, or --rehearse" in refused(gpu.main)


def test_rows_with_other_losses_and_rows_that_fail_are_faults_unless_for_a_good_reason(tmp_path):
    def faults(change):
        results = read_results(ROOT / "results/intel-xeon-2-threads-amx/reference/runs.jsonl")
        change(results["modes"]["ladder"]["rows"])
        write(tmp_path / "ladder", {"table.md": table_of(results)})
        return "".join(gpu.faults(tmp_path, {"ladder": "done"}))

    for note in ("error: out of memory", "ModuleNotFoundError: No module named 'lightning'"):
        assert not faults(lambda rows, note=note: rows["flash"].update(note=note))
    found = faults(lambda rows: rows["flash"].update(note="RuntimeError: CUDA error"))
    assert found.startswith("ladder: | flash ") and "RuntimeError: CUDA error" in found
    found = faults(lambda rows: rows["flash"]["profile"][0].update(losses=[1.0] * 5))
    assert "ladder: WRONG: the losses of flash are not naive's." in found


@pytest.mark.nightly
def test_a_rehearsal_reaches_its_end(dense, tmp_path):
    for source in [
        *ROOT.glob("*.py"),
        *(ROOT / name for name in ("config", "data", "operators", "nanoladder", "lab", "tests")),
    ]:
        ignored = {"ignore": shutil.ignore_patterns("*.bin", "meta.json")} if source.is_dir() else {}
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / source.name, **ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(dense, tmp_path / "data/python_stdlib_byte", dirs_exist_ok=True)  # the others take minutes more
    command = ["bash", str(tmp_path / "lab/gpu.sh"), "--rehearse", "--minutes=30", "--out_dir=out/gpu"]
    result = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    state = {part.row["name"]: part.failed or gpu.DONE for part in read(tmp_path / "out/gpu" / RUNS, "parts")[1]}
    for name, words in gpu.parts().items():
        here = "--dataset=python_stdlib_byte" in words and name != "peers"
        assert state[name] == "done" or (state[name].startswith("skipped") and not here)
    assert "nothing is wrong" in result.stdout
