"""wandb gets the config and every row; if it cannot start, the run continues without it."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import replace, rows, tiny, words
from processes import python

import train


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), save_interval=2, wandb=True)


def fail(*_, **__):
    raise ConnectionError("no route to host")


@pytest.fixture
def wandb(monkeypatch):
    """Fake wandb: `begun` holds the arguments of init(), `logged` the rows."""
    fake = SimpleNamespace(begun={}, logged=[], ended=[], Settings=dict)
    fake.run = SimpleNamespace(log=lambda row, step: fake.logged.append(row), finish=fake.ended.append)
    fake.init = lambda **given: fake.begun.update(given) or fake.run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_config_and_the_rows(wandb, config, run_main):
    result = run_main(train.main, *words(config, eval_interval=2))
    assert (wandb.begun["project"], wandb.begun["name"], wandb.begun["dir"]) == ("nanoladder", "run", config.out_dir)
    assert wandb.begun["config"].keys() == vars(config).keys() and wandb.begun["settings"]["finish_timeout"]
    assert wandb.logged == rows(config) and len(wandb.logged) == 6 and wandb.ended == [0]
    assert result.err == ""


def test_wandb_is_told_of_a_crash(config, wandb, monkeypatch):
    monkeypatch.setattr(train, "evaluate", fail)
    with pytest.raises(ConnectionError):
        train.train(replace(config, eval_interval=4))
    assert wandb.ended == [1] and len(wandb.logged) == 3


@pytest.mark.parametrize("trouble", ["import", "init"])
def test_a_failure_to_start_wandb_is_only_a_warning(trouble, wandb, config, run_main, monkeypatch):
    if trouble == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        monkeypatch.setattr(wandb, "init", fail)
    result = run_main(train.main, *words(config))
    assert result.code == 0 and len(rows(config)) == 6
    assert result.err.count("warning: the run continues without wandb") == 1


@pytest.mark.slow
def test_wandb_for_real_offline(config, tmp_path):
    folders = {f"WANDB_{kind}_DIR": str(tmp_path / "wandb") for kind in ("DATA", "CACHE", "CONFIG")}
    environment = {**os.environ, **folders, "WANDB_MODE": "offline"}
    result = python("train.py", *words(config), env=environment)
    assert result.returncode == 0 and "wandb sync" in result.stderr, result.stderr
    assert list(Path(config.out_dir, "wandb", "latest-run").glob("run-*.wandb"))
    assert len(rows(config)) == 6
