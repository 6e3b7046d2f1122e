"""Runs that are killed, that find no room on the disk, and that go on in another process end as if nothing had been."""

import collections
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags, replace, rows, same, saved, tiny

import checkpoint
import files
import report
import train

LOGGED = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
KILLS = 50


def equal(ours, theirs, names=("last", "best")):
    """Asserts that two runs logged the same and ended in the same state, bit for bit."""
    assert rows(ours, *LOGGED) == rows(theirs, *LOGGED)
    for name in names:
        one, other = saved(ours, name), saved(theirs, name)
        for part in ("model", "optimizer", "scaler", "generators", "progress"):
            assert same(one[part], other[part]), (name, part)


def test_a_run_killed_fifty_times_ends_as_if_nothing_had_been(dense, tmp_path):
    keys = {"dropout": 0.2, "max_steps": 200, "n_layer": 1, "log_interval": 3, "eval_interval": 7, "eval_windows": 2}
    keys |= {"dataset": str(dense), "save_interval": 2, "init_from": "auto"}
    ours, theirs = (tiny(**keys, out_dir=str(tmp_path / name)) for name in ("killed", "whole"))
    for config, kills in ((theirs, 0), (ours, KILLS)):
        job = {"argv": [f"--{key}={value}" for key, value in vars(config).items()], "kills": kills, "seed": 7}
        path = tmp_path / f"{kills}.json"
        path.write_text(json.dumps(job | {"log": str(tmp_path / f"{kills}.log")}))
        command = [sys.executable, "tests/forker.py", str(path)]
        result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
    phases = collections.Counter(json.loads(path.read_text()))
    print(dict(phases))
    assert phases.total() == KILLS and all(phases[phase] >= 5 for phase in ("step", "write", "rename")), phases
    printed = (tmp_path / f"{KILLS}.log").read_text()
    assert "damaged" not in printed and "Traceback" not in printed
    assert printed.count("config  ") == KILLS + 1
    equal(ours, theirs)
    assert not list(Path(ours.out_dir).glob(".*"))
