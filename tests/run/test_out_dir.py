"""An out_dir belongs to one run at a time."""

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, flags, replace, rows, same, tiny, weights
from processes import holding

import train
from nanoladder import files
from nanoladder.run import run


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), dropout=0.2)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_run_replaces_no_dataset_s_tokenizer(config, dense, tmp_path, refused):
    shutil.copytree(dense, tmp_path / "other")
    before = contents(tmp_path / "other")
    line = refused(train.main, *flags(dataset=config.dataset, out_dir=tmp_path / "other"))
    assert f"out_dir={tmp_path}/other holds a dataset" in line and contents(tmp_path / "other") == before


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_has_ended_even_by_a_kill(config, run_main, refused, tmp_path):
    """The first run takes its batches from worker processes, which outlive it for a moment."""
    words = {"dataset": config.dataset, "out_dir": config.out_dir, "dropout": 0.2, "num_workers": 1}
    endless = flags(**words, max_steps=10**6, save_interval=5)
    with subprocess.Popen([sys.executable, "train.py", *endless], cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        try:
            while not (Path(config.out_dir) / "last.safetensors").exists():
                assert first.poll() is None
                time.sleep(0.05)
            os.kill(first.pid, signal.SIGSTOP)
            for more in ({"overwrite": True}, {"init_from": "auto"}):
                line = refused(train.main, *flags(**words, max_steps=2000, **more))
                assert f"{config.out_dir} is in use: process {first.pid} on {platform.node()} trains there" in line
        finally:
            os.kill(first.pid, signal.SIGKILL)
    assert run_main(train.main, *flags(**words, overwrite=True)).code == 0
    whole = replace(config, out_dir=str(tmp_path / "whole"))
    train.train(whole)
    assert rows(config, "step", "train_loss") == rows(whole, "step", "train_loss")
    assert same(weights(config), weights(whole))


@pytest.fixture
def held(config):
    """Another process holds the lock of out_dir."""
    path = Path(config.out_dir, run.LOCK)
    path.parent.mkdir()
    with holding(path):
        yield path


def test_nothing_is_touched_by_a_run_that_is_refused(config, held, refused):
    held.write_text(f"process 1 on {platform.node()}")
    (held.parent / "last.safetensors").write_bytes(b"of the other run")
    before = contents(held.parent)
    refused(train.main, *flags(dataset=config.dataset, out_dir=config.out_dir, overwrite=True))
    assert contents(held.parent) == before


def test_the_lock_of_a_machine_that_may_be_lost_is_only_warned_of(config, held, run_main):
    held.write_text("process 1 on a-lost-node")
    result = run_main(train.main, *flags(dataset=config.dataset, out_dir=config.out_dir))
    assert result.code == 0 and "warning: process 1 on a-lost-node trains in out_dir=" in result.err
    assert len(rows(config, "step")) == config.max_steps


def test_a_file_system_without_locks_is_no_obstacle(config, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "lockf", lockf)
    train.train(config)
    assert len(rows(config, "step")) == config.max_steps
