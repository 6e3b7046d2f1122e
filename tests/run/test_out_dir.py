"""An out_dir belongs to one run at a time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, contents, flags, tiny

import train


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), dropout=0.2)


@pytest.mark.parametrize("held", ["meta.json", "train.bin", "model.safetensors", "pytorch_model.bin"])
def test_a_run_never_replaces_the_tokenizer_of_a_dataset_or_model(held, config, dense, tmp_path, refused):
    """train.bin is all that nanoGPT's have; a model in Hugging Face's format has a config.json, too."""
    shutil.copytree(dense, tmp_path / "other")
    for name in ("meta.json", "train.bin"):
        (tmp_path / "other" / name).unlink()
    (tmp_path / "other" / held).touch()
    before = contents(tmp_path / "other")
    line = refused(train.main, *flags(dataset=config.dataset, out_dir=tmp_path / "other"))
    assert f"out_dir={tmp_path}/other holds {held}," in line and contents(tmp_path / "other") == before


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
            line = refused(train.main, *flags(**words, max_steps=20, init_from="auto"))
            assert f"another run trains in out_dir={config.out_dir};" in line
        finally:
            os.kill(first.pid, signal.SIGKILL)
    assert run_main(train.main, *flags(**words, max_steps=20, init_from="auto")).code == 0
