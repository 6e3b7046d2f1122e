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
from conftest import ROOT, flags, rows, tiny
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
def test_a_second_run_is_refused_until_the_first_has_ended_even_by_a_kill(config, run_main, refused):
    """The first run takes its batches from worker processes, which outlive it for a moment."""
    words = {"dataset": config.dataset, "out_dir": config.out_dir, "dropout": 0.2, "num_workers": 1}
    endless = flags(**words, max_steps=10**6, save_interval=5)
    with subprocess.Popen([sys.executable, "train.py", *endless], cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        try:
            while not (Path(config.out_dir) / "last.safetensors").exists():
                assert first.poll() is None
                time.sleep(0.05)
            os.kill(first.pid, signal.SIGSTOP)
            line = refused(train.main, *flags(**words, max_steps=2000, init_from="auto"))
            assert f"{config.out_dir} is in use: process {first.pid} on {platform.node()} trains there" in line
        finally:
            os.kill(first.pid, signal.SIGKILL)
    assert run_main(train.main, *flags(**words, max_steps=2000, init_from="auto")).code == 0


@pytest.fixture
def held(config):
    """Another process holds the lock of out_dir."""
    path = Path(config.out_dir, run.LOCK)
    path.parent.mkdir()
    with holding(path):
        yield path


def test_nothing_is_touched_by_a_run_that_is_refused(config, held, refused):
    held.write_text(f"process 1 on {platform.node()}")
    before = contents(held.parent)
    refused(train.main, *flags(dataset=config.dataset, out_dir=config.out_dir))
    assert contents(held.parent) == before


def test_a_file_system_without_locks_is_no_obstacle(config, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "lockf", lockf)
    train.train(config)
    assert len(rows(config, "step")) == config.max_steps
