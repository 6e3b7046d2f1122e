"""lab/gpu.sh runs its parts one by one, goes on where it was, and says what is wrong."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

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


def test_a_part_that_fails_or_runs_out_of_time_does_not_keep_the_others_from_running(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    parts = [*planted(a="raise SystemExit('no luck')"), *planted(b="time.sleep(600)", share=0.005), *planted(c="1")]
    lines, wrong = gpu.measure(parts, tmp_path, 300, rehearse=False)
    state = json.loads((tmp_path / "state.json").read_text())
    assert [state[name]["status"] for name in "abc"] == ["failed", "out of time", "done"]
    assert wrong == ["a: exit code 1; no luck"]
    assert lines[-1] == "WRONG: a: exit code 1; no luck"
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines


def test_what_is_done_is_not_done_again_and_what_is_not_is(tmp_path):
    count = "f = folder / '{0}'; f.write_text(f.read_text() + 'x' if f.exists() else 'x')"
    parts = planted(a=count.format("a"), b=count.format("b") + "; assert len(f.read_text()) > 1")
    assert gpu.measure(parts, tmp_path, 1000, rehearse=False)[1]
    assert not gpu.measure(parts, tmp_path, 1000, rehearse=False)[1]
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("x", "xx")


def test_no_part_starts_when_the_time_is_over(tmp_path):
    parts = planted(a="(folder / 'a').touch()")
    _, wrong = gpu.measure(parts, tmp_path, 0, rehearse=False)
    assert not wrong and not (tmp_path / "a").exists()


def test_what_a_part_leaves_running_ends_with_it(tmp_path):
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}])"
    gpu.measure(planted(a=f"{start}; (folder / 'child').write_text(str(p.pid))"), tmp_path, 300, rehearse=False)
    pid = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        while True:  # it is no child of ours: until its new parent has waited for it, it is there
            os.kill(pid, 0)
            time.sleep(0.1)


def test_a_part_without_its_data_or_its_packages_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    parts = [gpu.Part("tests", "pytest", (), 0.1), gpu.Part("a", "train.py", (), 0.1, dataset="nowhere")]
    lines, wrong = gpu.measure(parts, tmp_path, 100, rehearse=False)
    assert lines == [
        "tests: skipped: needs pytest and hypothesis",
        "a: skipped: data/nowhere is not prepared: bash lab/gpu.sh --prepare",
        "nothing is wrong",
    ]
    assert not wrong


def test_no_peer_at_all_is_a_part_that_is_skipped_and_one_is_enough(monkeypatch):
    found = set()
    monkeypatch.setattr(peers, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(gpu, "ROOT", SimpleNamespace())  # no dataset is asked for
    part, with_checkout = (
        gpu.Part("peers", "profile.py", words, 0.1, mode="peers") for words in ((), ("--nanogpt=x",))
    )
    assert part.lacks() == "no peer is here: pip install -r requirements-peers.txt" and not with_checkout.lacks()
    found.add("transformers")
    assert part.lacks()
    found.add("lightning")
    assert not part.lacks()


def test_too_few_minutes_for_a_search_are_no_fault_and_it_is_tried_again(tmp_path):
    code = "import sys; print('error: minutes=1: a step takes 2 s; expected at least --minutes=3'); sys.exit({})"
    lines, wrong = gpu.measure(planted(a=code.format(2)), tmp_path, 300, rehearse=False)
    assert lines[0].startswith("a: skipped: error: minutes=1: ") and not wrong
    assert gpu.measure(planted(a=code.format(1)), tmp_path, 300, rehearse=False)[1]


def test_a_part_that_is_cut_off_keeps_its_files_and_what_it_has_printed(tmp_path, monkeypatch):
    class OutOfTime(subprocess.Popen):
        """Its time is over when it has written its results."""

        def wait(self, timeout=None):
            if timeout == 150:
                while not (tmp_path / "a/peers.json").exists():
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", OutOfTime)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "print('so far'); (folder / 'a').mkdir(); (folder / 'a/peers.json').write_text('1'); time.sleep(600)"
    gpu.measure(planted(a=code), tmp_path, 300, rehearse=False)
    assert (tmp_path / "a.log").read_text() == "so far\n"
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        assert {"a/peers.json", "a.log", "state.json", "summary.txt"} <= set(tar.getnames())


def test_the_search_has_the_same_time_in_every_call_and_its_config_is_for_the_peers(tmp_path):
    search, beside = (next(part for part in gpu.parts(20) if part.mode == mode) for mode in ("tune", "peers"))
    assert gpu.parts(20).index(search) < gpu.parts(20).index(beside)
    assert f"--tuned_dir={tmp_path / 'tuned'}" in set(search.command(tmp_path, False)) & set(
        beside.command(tmp_path, False)
    )
    options, _ = plan.parse(search.command(tmp_path, False)[2:])
    assert 60 * options.minutes < search.share * 20 * 60 - gpu.GRACE


def test_a_path_that_is_no_checkout_is_one_line_before_anything_runs(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "expected a checkout" in refused(gpu.main, f"--nanogpt={tmp_path}", f"--out_dir={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


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


def test_prepare_writes_what_is_not_there_and_names_what_it_cannot_write(tmp_path, monkeypatch, capsys):
    (tmp_path / "data/python_stdlib").mkdir(parents=True)
    (tmp_path / "data/python_stdlib/meta.json").write_text("x" * 10**5)
    commands = []

    def run(command):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, "shakespeare" in command[1])

    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.subprocess, "run", run)
    gpu.prepare("plays.txt")
    assert commands[1:] == [
        ["data/python_stdlib/prepare.py", "--tokenizer=bpe:50257"],
        ["data/shakespeare_char/prepare.py", "--input=plays.txt"],
    ]
    out = capsys.readouterr().out
    assert "not prepared: data/shakespeare_char\n" in out and out.endswith("0.1 MB in all\n")


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


def test_the_summary_says_in_seventy_lines_what_was_found(finished):
    parts = gpu.parts()
    lines, wrong = report.summary(parts, finished, done(parts))
    assert 60 < len(lines) <= 70
    assert max(map(len, lines)) <= 120
    assert not wrong and lines[-1] == "nothing is wrong"
    assert not [line for line in lines if line.endswith(("e", "within"))]  # cut off
    text = "\n".join(lines)
    for found in (
        "Intel Xeon, 2 threads, AMX; torch ",
        "The machine itself: matrix products float32 ",
        "64 passed",
        "0.729 GB  2.42×",
        "optimizers: done in 100 s",
        "  kept attention=matmul: 1.18× (1.11–1.25)\n",
        " as fast as the finished loop\n",
        "  Lightning, compiled            2092.51 ms  2.26×",
    ):
        assert found in text
    [curve] = [part for part in parts if part.name == "train-reference"]
    assert report.summary([curve], finished, done([curve]))[0][1] == "  step 20, train 1.2500, val 1.5000, 3.00 ms/step"


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
    assert peer(finished, note=None, time=times)[1] == ["peers, Lightning: losses 1 from naive's"]


def test_a_search_that_is_not_over_has_the_lines_of_what_it_has_tried(finished):
    path, [part] = finished / "tune/tune.json", [part for part in gpu.parts() if part.mode == "tune"]
    results = json.loads(path.read_text()) | {"confirmations": []}
    results["races"] = [*results["races"][:1], results["races"][1] | {"outcome": None}]
    results["races"][0] |= {"outcome": "failed", "note": "CUDA out of memory"}
    path.write_text(json.dumps(results))
    lines, wrong = report.lines_of(part, finished)
    assert lines[0] == "0 kept, 0 slower, 0 without a gain, 1 failed, 1 open" and not wrong
    assert lines[1].endswith(": CUDA out of memory") and len(lines) == 2


def rewrite(folder, change):
    """Applies change(rows) to the stored rows of the first ladder."""
    path = folder / LADDERS[0].name / "results.json"
    results = read_results(path)
    change(results["modes"]["ladder"]["rows"])
    path.write_text(json.dumps(results))


@pytest.mark.parametrize("nats, fault", [(math.nan, "losses inf from naive's"), (9.0, "from naive's")])
def test_a_wrong_loss_is_wrong(finished, nats, fault):
    rewrite(finished, lambda rows: rows["amp"]["examine"][0].update(losses=[nats] * 5))
    _, [wrong] = report.summary(LADDERS[:1], finished, {})
    assert wrong.startswith(f"{LADDERS[0].name}, amp: losses ") and wrong.endswith(fault)


def test_a_row_that_cannot_run_for_a_reason_is_none_and_another_is(finished):
    rewrite(finished, lambda rows: [rows[name].update(note="error: out of memory") for name in ("naive", "amp")])
    assert not report.summary(LADDERS[:1], finished, {})[1]
    rewrite(finished, lambda rows: rows["flash"].update(note="RuntimeError: CUDA error"))
    assert report.summary(LADDERS[:1], finished, {})[1] == [f"{LADDERS[0].name}, flash: RuntimeError: CUDA error"]


def test_a_failed_test_is_named(finished):
    log = "FAILED tests/a.py::old\n=== test session starts ===\nFAILED tests/a.py::new - boom\n= 1 failed in 2.0s =\n"
    (finished / "tests.log").write_text(log)
    lines, wrong = report.summary(gpu.parts()[:1], finished, {})
    assert wrong == ["tests/a.py::new failed"] and "  1 failed in 2.0s" in lines


@pytest.mark.nightly
def test_a_rehearsal_is_killed_and_goes_on_to_the_end(dense, tmp_path):
    for source in [*ROOT.glob("*.py"), *(ROOT / name for name in ("config", "data", "nanoladder", "lab", "tests"))]:
        ignored = {"ignore": shutil.ignore_patterns("*.bin", "meta.json")} if source.is_dir() else {}
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / source.name, **ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(dense, tmp_path / "data/python_stdlib_byte", dirs_exist_ok=True)  # the others take minutes more
    command = ["bash", str(tmp_path / "lab/gpu.sh"), "--rehearse", "--minutes=30", "--out_dir=out/gpu"]
    environment = os.environ | {"PYTHON": sys.executable}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == "reference-256 …\n":
                process.send_signal(signal.SIGTERM)
    folder = tmp_path / "out/gpu"
    assert process.returncode == 1
    state = json.loads((folder / "state.json").read_text())
    assert list(state) == ["tests", "reference-50257"]
    state["tune"] = {"status": "done", "seconds": 0}  # it would take all of its time, and test_tune.py searches
    (folder / "state.json").write_text(json.dumps(state))

    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    state = json.loads((folder / "state.json").read_text())
    skipped = {part.name for part in gpu.parts() if part.dataset not in ("", "python_stdlib_byte")}
    skipped |= {"peers"} if len(peers.missing(None)) > len(peers.NEEDED) else set()
    assert {name: part["status"] for name, part in state.items()} == {
        part.name: "skipped" if part.name in skipped else "done" for part in gpu.parts()
    }
    assert (folder / "tests.log").read_text().count("test session starts") == 1  # not done again
    assert "nothing is wrong" in (folder / "summary.txt").read_text()
    with tarfile.open(folder / "results.tar.gz") as tar:
        assert {"reference-256/results.json", "train-reference/metrics.jsonl", "tests.log"} <= set(tar.getnames())
