"""lab/gpu.sh runs its parts one by one, goes on where it was, and says what is wrong."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time

import pytest
import torch
from conftest import ROOT

from lab import gpu, plan, report
from lab.peers import mode as peers
from lab.results import read_results
from nanoladder.run import load_config

LADDERS = [part for part in gpu.parts() if part.mode == "ladder"]


@dataclasses.dataclass(frozen=True)
class Planted(gpu.Part):
    """A part that runs some Python and has no results."""

    def command(self, folder, rehearse):
        return [sys.executable, "-c", f"import time, pathlib; folder = pathlib.Path({str(folder)!r}); {self.words[0]}"]


def planted(share=0.5, **parts):
    return [Planted(name, "planted", (code,), share) for name, code in parts.items()]


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
    assert [state[name]["status"] for name in "abcd"] == ["failed", "out of time", "skipped", "done"]
    assert wrong == ["a: exit code 1; no luck"] and "c: skipped: error: data/nowhere is not prepared" in lines
    assert lines[-1] == "WRONG: a: exit code 1; no luck"
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines
    with pytest.raises(ProcessLookupError):
        while True:  # what b has started: it is there until its new parent has waited for it
            os.kill(int((tmp_path / "child").read_text()), 0)
            time.sleep(0.1)
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        assert {"b.log", "state.json", "summary.txt"} <= set(tar.getnames())
    assert (tmp_path / "b.log").read_text() == "so far\n"


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_what_is_not_is(tmp_path):
    count = "f = folder / '{0}'; f.write_text(f.read_text() + 'x' if f.exists() else 'x')"
    parts = planted(a=count.format("a"), b=count.format("b") + "; assert len(f.read_text()) > 1")
    assert gpu.measure(parts, tmp_path, 1000, rehearse=False)[1]
    assert not gpu.measure(parts, tmp_path, 1000, rehearse=False)[1]
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("x", "xx")


def test_tests_that_passed_are_not_run_again(tmp_path):
    log = "tests/a.py::one[x y] PASSED [ 50%]\ntests/a.py::two FAILED [100%]\n"
    (tmp_path / "tests.log").write_text(log)
    command = gpu.Part("tests", "pytest", ("tests/a.py",), 0.1).command(tmp_path, rehearse=False)
    assert command[1:] == ["-m", "pytest", "tests/a.py", "--deselect=tests/a.py::one[x y]"]


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("part", gpu.parts(), ids=lambda part: part.name)
def test_every_part_has_a_valid_command(part, rehearse, tmp_path):
    words = part.command(tmp_path, rehearse)[1:]
    if part.program == "profile.py":
        options, config_words = plan.parse(words[1:])
        if options.mode == "peers":
            peers.require_comparable(load_config(config_words))
        if options.mode in ("peers", "tune"):
            return
        rows = plan.rows(options, config_words)
        reasons = plan.not_applicable(rows, options.mode)
        assert all(reason.startswith("not applicable") for reason in reasons.values())
        assert len(rows) > len(reasons)
    elif part.program != "pytest":
        load_config(words[words.index(part.program) + 1 :])
    assert not part.dataset or part.dataset in gpu.DATASETS


def test_without_a_gpu_it_says_so(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU here; expected one, or --rehearse" in refused(gpu.main)


@pytest.fixture
def finished(tmp_path):
    """A folder with results of every part, those of the ladders from results/."""
    stored = ROOT / "results/intel-xeon-2-threads-amx/reference/results.json"
    for part in LADDERS:
        results = read_results(stored)
        rows = results["modes"]["ladder"]["rows"]
        chosen = plan.split(part.words)[0].stages or rows
        results["modes"] = {"ladder": results["modes"]["ladder"] | {"rows": {name: rows[name] for name in chosen}}}
        (tmp_path / part.name).mkdir()
        (tmp_path / part.name / "results.json").write_text(json.dumps(results))
    (tmp_path / "tests.log").write_text("=== test session starts ===\n=== 64 passed in 60.00s ===\n")
    for name in ("tune", "peers"):
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / f"results/amd-epyc-2-threads-bf16/reference/{name}.json", tmp_path / name)
    (tmp_path / "train-reference").mkdir()
    metrics = {"step": 10, "train_loss": 1.5, "step_ms": 3.0}, {"step": 20, "train_loss": 1.25, "val_loss": 1.5}
    (tmp_path / "train-reference/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return tmp_path


def done(parts):
    """The state of parts that are done."""
    return {part.name: {"status": "done", "seconds": 100} for part in parts}


def test_the_summary_says_what_was_found(finished):
    parts = gpu.parts()
    lines, wrong = report.summary(parts, finished, done(parts))
    assert not wrong and lines[-1] == "nothing is wrong" and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for found in (
        "Intel Xeon, 2 threads, AMX; torch ",
        "The machine itself: matrix products float32 ",
        "64 passed in 60.00s",
        "  The fastest step (",
        "optimizers: done in 100 s",
        "  attention=matmul: 1.18× (1.11–1.25) as fast, kept\n",
        "  The fastest: ",
    ):
        assert found in text, text
    [curve] = [part for part in parts if part.name == "train-reference"]
    assert report.summary([curve], finished, done([curve]))[0][1] == "  step 20, train 1.25, val 1.5, ms/step 3"


def peer(folder, **changes):
    """The summary of the peers, Lightning's row changed."""
    path, [part] = folder / "peers/peers.json", [part for part in gpu.parts() if part.mode == "peers"]
    results = json.loads(path.read_text())
    results["rows"]["Lightning"] |= changes
    path.write_text(json.dumps(results))
    return report.summary([part], folder, done([part]))


def test_a_peer_that_is_not_here_is_none_and_one_that_fails_or_trains_something_else_is_wrong(finished):
    for legitimate in (peers.missing(None)["nanogpt"], f"needs lightning: {peers.INSTALL}", "out of memory"):
        assert not peer(finished, note=legitimate)[1]
    assert peer(finished, note="RuntimeError: boom")[1] == ["peers, Lightning: RuntimeError: boom"]
    times = json.loads((finished / "peers/peers.json").read_text())["rows"]["Lightning"]["time"]
    times[0]["losses"][-1] += 1
    assert peer(finished, note=None, time=times)[1] == ["peers, Lightning: WRONG by 1"]


def rewrite(folder, change):
    """Applies change(rows) to the stored rows of the first ladder."""
    path = folder / LADDERS[0].name / "results.json"
    results = read_results(path)
    change(results["modes"]["ladder"]["rows"])
    path.write_text(json.dumps(results))


def test_a_row_that_cannot_run_for_a_reason_is_none_and_another_is(finished):
    rewrite(finished, lambda rows: [rows[name].update(note="error: out of memory") for name in ("naive", "amp")])
    assert not report.summary(LADDERS[:1], finished, {})[1]
    rewrite(finished, lambda rows: rows["flash"].update(note="RuntimeError: CUDA error"))
    assert report.summary(LADDERS[:1], finished, {})[1] == [f"{LADDERS[0].name}, flash: RuntimeError: CUDA error"]


def test_a_failed_test_is_named(finished):
    log = "FAILED tests/a.py::old\n=== test session starts ===\nFAILED tests/a.py::new - boom\n= 1 failed in 2.0s =\n"
    (finished / "tests.log").write_text(log)
    lines, wrong = report.summary(gpu.parts()[:1], finished, {})
    assert wrong == ["tests, tests/a.py::new failed"] and "  1 failed in 2.0s" in lines


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
        here = part.dataset in ("", "python_stdlib_byte") and part.name not in ("tune", "peers")
        assert state[part.name]["status"] == "done" if here else state[part.name]["status"] in ("done", "skipped")
    assert "nothing is wrong" in (tmp_path / "out/gpu/summary.txt").read_text()
