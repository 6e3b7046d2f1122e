"""--mode=judge tells a gain from noise, runs the other version's own code, and leaves the checkout alone."""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import MACHINE, ROOT, FakeTurns, contents, flags

from lab.measure import judge, modes, stats
from lab.measure.runs import LOCK, RUNS, read
from nanoladder.errors import BadInput

PROFILED = {"losses": [5.0, 4.0, 3.0, 2.0, 1.0], "memory": {"peak": 2e9}}


@pytest.fixture
def planted(monkeypatch, dense, tmp_path):
    """planted(answer, *words) -> exit code, rounds and verdict; answer(side, measurement, words) fakes processes."""
    monkeypatch.setattr(judge, "check_out", lambda folder, *_: {"other": "1234567", "this": "7654321"})

    def run(answer, *words, metric="speed"):
        class Command(FakeTurns):
            def __init__(self, measurement, words, root):
                super().__init__()
                self.given = root.name, measurement, words

            def figures(self):
                return MACHINE if self.given[1] == "machine" else answer(*self.given)

        monkeypatch.setattr(judge, "Command", Command)
        argv = [*flags(dataset=dense), "--mode=judge", "--against=HEAD", f"--metric={metric}", f"--out_dir={tmp_path}"]
        with pytest.raises(SystemExit) as exit:
            modes.main([*argv, *words])
        _, found = read(tmp_path / RUNS, f"judge-{metric}")
        rounds = [run.figures for run in found if "round" in run.row]
        return exit.value.code, {"rounds": rounds, "verdict": found[-1].figures}

    return run


# -- the statistics


def judged(seed, gain):
    """Change detected on a noisy machine that slows down and has outliers; 0.0 if none is."""
    draw, pace, (looks, level), changes = random.Random(seed), 1.0, stats.looks(24), []
    for number in range(1, 25):
        values = {}
        for side in stats.order(number):
            pace *= 1 + draw.gauss(0.003, 0.003)  # common to both versions
            noise = abs(draw.gauss(0, 0.01)) + (draw.expovariate(10) if draw.random() < 0.05 else 0.0)
            values[side] = {"seconds": pace * (1 + noise) * (1 + gain if side == "this" else 1)}
        changes.append(judge.METRICS["speed"].change(**values))
        if number in looks and (change := stats.intervals({"speed": changes}, level)["speed"]).significant:
            return change.middle
    return 0.0


@pytest.mark.parametrize("gain", [0.0, 0.02, -0.02])
def test_equal_versions_are_told_apart_at_most_once_in_20_and_2_percent_are_found(gain):
    found = [judged(seed, gain) for seed in range(200)]
    assert sum(change == 0 if gain == 0 else change * gain > 0 for change in found) >= (190 if gain == 0 else 180)


def test_every_second_round_begins_with_this_version(planted):
    """On a machine that slows down by 1 % with each process, and does nothing else."""
    asked = []

    def answer(side, measurement, _):
        asked.append(side)
        return PROFILED if measurement == "profile" else {"seconds": 1.01 ** len(asked)}

    code, results = planted(answer, "--rounds=6")
    assert asked == ["other", "this", *["other", "this", "this", "other"] * 3]
    verdict = results["verdict"]
    assert code == 0 and re.fullmatch(r"no change larger than [12].\d\d % can be seen", verdict["text"])
    assert verdict["low"] == pytest.approx(-verdict["high"], rel=1e-3)


# -- the verdict


def test_the_report_names_the_change_its_interval_and_the_verdict(planted, capsys):
    def answer(side, measurement, _):
        if measurement == "profile":
            return PROFILED
        return {"seconds": {"other": [1.00, 1.01], "this": [0.960, 0.975]}[side][next(number) // 2 % 2]}

    number = itertools.count()
    code, results = planted(answer)
    out = capsys.readouterr().out
    assert code == 0 and len(results["rounds"]) == 8  # clear at the first look
    assert out.splitlines()[-1] == results["verdict"]["text"] == "faster by 3.73 % (3.19 % to 4.28 %)"
    table = [re.split("  +", line.strip()) for line in out.splitlines()]
    assert table[:3] == [["this:"], ["1234567", "7654321", "change", "95% interval"], table[2]]
    assert table[2] == ["ms/step", "1005", "967.5", "-3.73 %", "-4.28 % to -3.19 %"]


def test_memory_is_counted_without_rounds(planted, capsys):
    def answer(side, measurement, _):
        assert measurement == "profile"
        return PROFILED | {"memory": {"peak": peaks[side]}}

    for this, expected in {
        2e9 + 4: (0, "no change of tensors GB"),
        1.9e9: (0, "less memory by 5.00 %"),
        2.1e9: (1, "more "),
    }.items():
        peaks = {"other": 2e9, "this": this}
        code, results = planted(answer, metric="memory")
        assert code == expected[0] and expected[1] in results["verdict"]["text"]
    table = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert ["tensors GB", "2", "2.1", "5.00 %", "counted"] in table


def test_other_losses_are_wrong_before_anything_is_timed(planted, capsys):
    def answer(side, measurement, _):
        assert measurement == "profile"
        return PROFILED | {"losses": losses[side]}

    losses = {"other": [5.0, 4.0, 3.0, 2.0], "this": [5.005, 4.0, 3.0, 2.02]}
    code, _ = planted(answer)
    assert (code, capsys.readouterr().out.splitlines()[-1]) == (
        1,
        "WRONG: losses differ from step 4 (2.0200 instead of 2.0000)",
    )
    losses["this"][1] = float("nan")
    assert planted(answer)[1]["verdict"]["text"].startswith("WRONG: losses differ from step 2")


def trained(changes=(0.0,), **this):
    """Answers of training runs whose loss depends on the seed and, for this version, on a change per seed."""

    def answer(side, measurement, words):
        assert measurement == "curve"
        seed = int(words[-1].removeprefix("--seed="))
        run = {"val_loss": 3 + seed % 7 / 100, "val_data": "abc", "tokens": 20}
        if side == "other":
            return run
        return run | {"val_loss": run["val_loss"] + changes[seed % len(changes)]} | this

    return answer


@pytest.mark.parametrize(
    "answer, code, text",
    [
        (trained([-0.004, -0.006]), 0, "lower loss by 0.0050 nats (0.0030 nats to 0.0070 nats)"),
        (trained([0.004, 0.006]), 1, "higher loss by 0.0050 nats (0.0030 nats to 0.0070 nats)"),
        (trained([0.004, -0.006]), 0, "no change larger than 0.0060 nats can be seen"),
        (trained(), 0, "no change of validation loss"),
        (trained(val_data="abd"), 1, "WRONG: it validates on other data"),
        (trained(tokens=30), 1, "WRONG: it trains on 30 tokens instead of 20"),
        (trained(val_loss=None), 1, "WRONG: it diverges with --seed=5"),
    ],
)
def test_losses_are_compared_seed_by_seed_on_the_same_data(answer, code, text, planted):
    found = planted(answer, "--seed=5", metric="loss")
    assert (found[0], found[1]["verdict"]["text"]) == (code, text)
    assert len(found[1]["rounds"]) in (0, 8, 24)


def test_this_version_that_fails_is_wrong_and_the_other_is_bad_input(planted, refused):
    def answer(side, *_):
        if side == failing:
            raise RuntimeError(reason)
        return PROFILED

    failing, reason = "this", "ZeroDivisionError: division by zero"
    assert planted(answer)[1]["verdict"]["text"] == f"WRONG: 7654321 fails: {reason}"
    failing = "other"
    with pytest.raises(BadInput, match=r"1234567 cannot run this config, or .*: ZeroDivisionError"):
        planted(answer)


def test_an_interrupted_judgment_resumes_and_a_finished_one_starts_over(planted):
    def answer(side, measurement, _):
        asked.append(measurement)
        if len(asked) == 7:
            raise KeyboardInterrupt
        return PROFILED if measurement == "profile" else {"seconds": 1.0 + len(asked)}

    asked = []
    with pytest.raises(KeyboardInterrupt):
        planted(answer, "--rounds=6")
    assert len(planted(answer, "--rounds=6")[1]["rounds"]) == 6
    assert asked == ["profile"] * 2 + ["time"] * (5 + 8)  # two rounds and a half, then the other four
    planted(answer, "--rounds=6")
    assert asked[15:] == ["profile"] * 2 + ["time"] * 12


# -- the two versions


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small git checkout in place of this one, with a commit, uncommitted changes and an index of its own."""
    root = tmp_path / "checkout"
    texts = {
        "train.py": "one\n",
        "gone.py": "",
        "lab/measure/measurements.py": "old\n",
        "config/x.py": "n_layer = 1\n",
        "nanoladder/x.py": "",
        "operators/x.py": "",
        ".gitignore": "*.bin\n",
    }
    write(root, texts)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=one")
    write(root, {"train.py": "two\n", "lab/measure/measurements.py": "new\n", "added.py": "", "data.bin": ""})
    git(root, "add", "train.py")
    write(root, {"train.py": "three\n", "config/mine.py": "", "notes.txt": ""})
    (root / "gone.py").unlink()
    monkeypatch.setattr(judge, "ROOT", root)
    monkeypatch.setattr("lab.measure.git.ROOT", root)
    return root


def write(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def git(root, *words):
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", root, *author, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_working_tree_is_judged_and_left_unchanged(repository, tmp_path, monkeypatch):
    before = contents(repository)
    names = judge.check_out(tmp_path / "judge", "HEAD")
    assert names == {"other": "HEAD", "this": f"{git(repository, 'rev-parse', '--short', 'HEAD')} + changes"}
    this, other = (tmp_path / "judge" / side for side in ("this", "other"))
    assert (this / "train.py").read_text() == "three\n"
    assert (other / "train.py").read_text() == "one\n"
    assert [(this / name).exists() for name in ("added.py", "gone.py", "data.bin")] == [True, False, False]
    assert [(other / name).exists() for name in ("added.py", "gone.py")] == [False, True]
    assert (other / "lab/measure/measurements.py").read_text() == "new\n"  # one lab/ measures both
    assert contents(repository) == before
    monkeypatch.setattr(judge, "Command", lambda _, words, root: words)
    words = judge.process_of(tmp_path / "judge", ["config/x.py", "config/mine.py"], ["--seed=1"], "other", "time")
    assert words == [str(other / "config/x.py"), str(repository / "config/mine.py"), "--seed=1"]


def test_an_unavailable_version_is_named(repository, tmp_path):
    with pytest.raises(BadInput, match="--against=nowhere: expected a commit or branch"):
        judge.check_out(tmp_path / "one", "nowhere")
    shutil.rmtree(repository / ".git")
    with pytest.raises(BadInput, match="--mode=judge takes two versions of a git checkout"):
        judge.check_out(tmp_path / "two", "HEAD")


# -- for real


@pytest.mark.slow
def test_an_interrupted_judgment_leaves_no_copy_behind(dense, tmp_path):
    root, copies = tmp_path / "checkout", tmp_path / "temporary"
    copies.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("config", "operators", "nanoladder", "lab"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for source in [*ROOT.glob("*.py"), ROOT / ".gitignore"]:
        shutil.copy(source, root)
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=one"]):
        git(root, *words)
    before = contents(root)
    words = ["--mode=judge", "--against=HEAD", "--metric=memory", f"--out_dir={tmp_path / 'out'}"]
    command = [sys.executable, "-B", "profile.py", *flags(dataset=dense), *words]
    streams = {"stderr": subprocess.PIPE, "text": True}
    judging = subprocess.Popen(command, cwd=root, env=os.environ | {"TMPDIR": str(copies)}, **streams)
    while not (tmp_path / "out" / LOCK).exists():
        assert judging.poll() is None
        time.sleep(0.05)
    assert list(copies.glob("judge-*/other/train.py"))
    judging.send_signal(signal.SIGTERM)
    printed = [line for line in judging.stderr.read().splitlines() if line and "run/s" not in line]  # beside the bar
    assert judging.wait() == 143 and printed == ["ended by SIGTERM"]
    assert list(copies.glob("judge-*")) == [] and contents(root) == before
