"""Runs that are killed or meet a full disk end as if uninterrupted."""

import collections
import contextlib
import copy
import errno
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import killed as kill
import pytest
import torch
from conftest import LOGGED, assert_same_state, build, replace, rows, same, saved, tiny, whole, words

import train
from nanoladder import checkpoint
from nanoladder.data import Batch
from nanoladder.run import Run

pytestmark = pytest.mark.slow

KILLS = [("step", 4), ("write_tensors", 1), ("fsync", 1), ("fsync", 3), ("fsync", 5), ("replace", 2), ("replace", 3)]
KILLS += [("link", 1), ("link", 2), ("unlink", 5), ("write_tensors", 2), ("step", 6), ("fsync", 8), ("replace", 6)]
KILLS += [("link", 5)]


def equal(ours, theirs, names=("last", "best")):
    """Asserts that two runs logged the same and ended in the same state, bit for bit."""
    assert rows(ours, *LOGGED) == rows(theirs, *LOGGED)
    for name in names:
        assert_same_state(ours, theirs, name=name)


@pytest.fixture
def killed(capfd):
    """killed(config, name, number) trains in a process killed as killed.py says; returns its exit code, out and err."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])  # imported once, for all processes

    def run(config, name, number):
        capfd.readouterr()
        process = context.Process(target=kill.run, args=(words(config), name, number))
        process.start()
        process.join()
        return process.exitcode, *capfd.readouterr()

    return run


def test_a_run_killed_fifteen_times_ends_as_if_uninterrupted(killed, dense, tmp_path):
    keys = {"dropout": 0.2, "max_steps": 60, "n_layer": 1, "log_interval": 3, "eval_interval": 7, "eval_windows": 2}
    keys |= {"dataset": str(dense), "save_interval": 2, "init_from": "auto"}
    ours, theirs = (tiny(**keys, out_dir=str(tmp_path / name)) for name in ("killed", "whole"))
    train.train(theirs)
    for name, number in [*KILLS, ("step", 0)]:
        code, out, err = killed(ours, name, number)
        assert code == (-signal.SIGKILL if number else 0), (name, number, err)
        assert "damaged" not in out and "Traceback" not in err, (name, number)
    equal(ours, theirs)
    assert [path.name for path in Path(ours.out_dir).glob(".*")] == [".lock"]


@contextlib.contextmanager
def failing(*failures, counts=kill.anywhere):
    """Context that lists the calls, (function, number), of killed.py's functions; `failures` find the disk full."""
    calls, numbers = [], collections.Counter()

    def counted(name, function):
        def call(*arguments, **options):
            if not counts():
                return function(*arguments, **options)
            numbers[name] += 1
            calls.append((name, numbers[name]))
            if calls[-1] in failures:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, (place, attribute) in kill.FUNCTIONS.items():
            patch.setattr(place, attribute, counted(name, getattr(place, attribute)))
        yield calls


def calls_of_save(config, step):
    """Trains, saving each step. Returns the calls (function, number) from the save of `step` up to the next save."""
    with failing() as calls:
        train.train(config)
    return calls[calls.index(("write_tensors", step)) : calls.index(("write_tensors", step + 1))]


def checkpoints(config):
    """{file name: dict of the checkpoint, without the config} of a run."""
    return {path.name: {**checkpoint.load(path), "config": {}} for path in Path(config.out_dir).glob("*.safetensors")}


@pytest.mark.parametrize("step", [1, 3], ids=["first", "third"])
def test_a_save_killed_at_any_of_its_calls_leaves_the_same_files_once_resumed(step, killed, dense, tmp_path):
    """Its checkpoint is the last and the best one: the first, or one that replaces two and removes a third."""
    keys = {"lr_decay_steps": 5, "save_interval": 1, "eval_interval": 1, "n_layer": 1}
    theirs = saving(dense, tmp_path / "whole", max_steps=step, **keys)
    train.train(theirs)
    expected = checkpoints(theirs)
    assert [state["progress"]["step"] for state in expected.values()].count(step) == 3
    calls = calls_of_save(replace(theirs, out_dir=str(tmp_path / "longer"), max_steps=5), step)
    counts = collections.Counter(name for name, _ in calls)
    assert counts["link"] == 2 and counts["replace"] == 3 and counts["unlink"] >= (step == 3)
    for name, number in calls:
        ours = replace(theirs, out_dir=str(tmp_path / f"{name}{number}"), init_from="auto")
        assert killed(replace(ours, max_steps=5), name, number)[0] == -signal.SIGKILL
        train.train(ours)
        assert same(checkpoints(ours), expected), (name, number)
        assert rows(ours, *LOGGED) == rows(theirs, *LOGGED)


# -- no room, no folder


@pytest.fixture
def limit():
    """limit(bytes) caps the size of files from now on, as if the disk were full; None removes the cap."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))

    yield set_limit
    set_limit(None)


@contextlib.contextmanager
def before_step(actions):
    """Context in which actions[step] is called before that step, while nothing is being written."""
    original, writers = train.train_step, []

    def step(*arguments):
        step.number += 1
        if step.number in actions:
            writers[0].wait()
            actions[step.number]()
        return original(*arguments)

    class Writer(checkpoint.Writer):
        def __enter__(self):
            writers.append(self)
            return self

    step.number = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", step)
        patch.setattr(checkpoint, "Writer", Writer)
        yield


def saving(dense, out_dir, **keys):
    keys = {"dropout": 0.2, "max_steps": 8, "save_interval": 2, "eval_interval": 4, **keys}
    return tiny(dataset=str(dense), out_dir=str(out_dir), **keys)


def names(config):
    """The checkpoints in a run's folder, without their suffix, and temporary files."""
    paths = [path for path in Path(config.out_dir).iterdir() if path.suffix in (".safetensors", ".tmp")]
    return sorted(path.name.removesuffix(".safetensors") for path in paths)


@pytest.mark.parametrize("resumed", [True, False])
def test_a_disk_full_at_any_call_of_a_save_loses_nothing_that_was_written(resumed, dense, tmp_path, monkeypatch):
    """The third of five evaluations is the best. The next save, or resuming, gives a checkpoint the names it lacks."""
    losses, log = [3.0, 2.0, 1.0, 1.5, 1.4], Run.log_evaluation
    monkeypatch.setattr(Run, "log_evaluation", lambda run, _: log(run, losses[run.progress["step"] - 1]))
    keys = {"lr_decay_steps": 5, "save_interval": 1, "eval_interval": 1, "n_layer": 1}
    theirs = saving(dense, tmp_path / "whole", max_steps=5, **keys)
    calls = [call for call in calls_of_save(theirs, 3) if call[0] != "step"]
    expected = checkpoints(theirs)
    assert expected["best.safetensors"]["progress"]["step"] == 3
    for name, number in calls:
        ours = replace(theirs, out_dir=str(tmp_path / f"{name}{number}"), init_from="auto")
        with failing((name, number)), contextlib.suppress(SystemExit):
            train.train(replace(ours, max_steps=3 if resumed else 5))
        train.train(ours)
        found = checkpoints(ours)
        if not resumed and (name, number) in calls[:2]:  # there never was a file of step 3
            assert found.pop("best.safetensors")["progress"] == found["last.safetensors"]["progress"]
            assert found["last.safetensors"]["progress"].items() >= {"best_val_loss": 1.4, "best_step": 5}.items()
            continue
        assert same(found, expected), (name, number)


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EISDIR])
def test_training_goes_on_when_a_checkpoint_cannot_be_written_and_saves_later(number, dense, tmp_path, limit, capsys):
    whole, ours = saving(dense, tmp_path / "whole"), saving(dense, tmp_path / "ours")
    train.train(whole)
    in_the_way = tmp_path / "ours" / f".last.safetensors.{os.getpid()}.tmp"
    actions = {4: lambda: limit(50_000), 6: lambda: limit(None)}  # a checkpoint has 300,000 bytes
    with before_step(actions if number == errno.EFBIG else {4: in_the_way.mkdir, 6: in_the_way.rmdir}):
        train.train(ours)
    assert f"warning: the checkpoint of step 4 is not saved: [Errno {number}]" in capsys.readouterr().err
    equal(ours, whole)
    assert names(ours) == ["best", "last", "step_00000006", "step_00000008"]


def test_checkpoints_missing_at_the_end_are_named_and_the_exit_code_is_1(dense, tmp_path, limit, run_main):
    ours = saving(dense, tmp_path / "full")
    with before_step({4: lambda: limit(250_000)}):
        result = run_main(train.main, *words(ours))
    limit(None)
    assert result.code != 0 and "Traceback" not in result.err
    assert result.err.count("warning: the checkpoint of step") == 3
    missing = f"error: {ours.out_dir} lacks last.safetensors of step 8 and best.safetensors of step 8"
    assert missing in f"{result.err}{result.code}"
    assert saved(ours)["progress"]["step"] == 2 and names(ours) == ["last", "step_00000002"]
    theirs = saving(dense, tmp_path / "whole")
    train.train(theirs)
    train.train(replace(ours, init_from="resume"))
    equal(ours, theirs)


# -- which checkpoints exist


def test_a_snapshot_does_not_change_when_training_goes_on(dense, tmp_path):
    config = replace(saving(dense, tmp_path), vocab_size=17)
    model, optimizer, scaler = build(config)
    batch = Batch(*torch.randint(17, (2, 4, 16)).unbind())
    progress = {"step": 1, "best_val_loss": 9.0, "best_step": 1, "interval_loss": torch.ones(()), "interval_steps": 1}
    train.train_step(model, optimizer, scaler, batch, 1e-2, config)
    state = whole(*checkpoint.snapshot(config, {}, model, optimizer, scaler, progress))
    before = copy.deepcopy(state)
    train.train_step(model, optimizer, scaler, batch, 1e-2, config)
    assert same(state, before)
    later = whole(*checkpoint.snapshot(config, {}, model, optimizer, scaler, progress))
    assert not same(state["model"], later["model"])


def test_a_restart_removes_partial_files_and_later_steps(dense, tmp_path):
    config = saving(dense, tmp_path)
    train.train(config)
    (tmp_path / ".last.safetensors.123.tmp").write_bytes(b"half")
    (tmp_path / "last.safetensors").unlink()
    (tmp_path / "step_00000008.safetensors").write_bytes(b"half")
    (tmp_path / "best.safetensors").unlink()
    train.train(replace(config, init_from="auto", max_steps=7, lr_decay_steps=8, eval_interval=0))
    assert names(config) == ["last", "step_00000006", "step_00000007"]
