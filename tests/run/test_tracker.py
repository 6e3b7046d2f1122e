"""wandb gets the config and every row; whatever it does, the run goes on."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, flags, replace, rows, tiny

import train


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), save_interval=2, track="wandb")


def fail(*_, **__):
    raise ConnectionError("no route\nto host")


@pytest.fixture
def wandb(monkeypatch):
    """A fake wandb: the calls of init() in `begun`, its rows in `logged`; `key` and `accepts` may be False."""
    fake = SimpleNamespace(begun=[], logged=[], ended=[], key=True, accepts=True, Settings=dict)

    def init(**given):
        fake.begun.append(given)
        offline = given["settings"].get("mode") == "offline"
        if not (offline or fake.accepts):
            fail()
        return SimpleNamespace(
            log=lambda row, step: fake.logged.append({"step": step, **row}),
            finish=lambda exit_code: fake.ended.append(exit_code),
            settings=SimpleNamespace(sync_dir="run-1"),
            offline=offline,
            url="https://wandb.test/run-1",
        )

    fake.login = lambda prompt, verify: fake.key and not prompt and not verify
    fake.init, fake.teardown = init, lambda: fake.begun.append("teardown")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_without_a_tracker_wandb_is_not_imported(config, wandb):
    train.train(replace(config, track="off"))
    assert not wandb.begun and len(rows(config)) == 6


def test_a_package_that_is_not_installed_is_refused_before_anything_is_written(config, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = refused(train.main, *flags(**vars(config)))
    assert "track=wandb" in line and "pip install wandb" in line and "--track=off" in line
    assert not Path(config.out_dir).exists()


def test_wandb_gets_the_config_and_the_rows(wandb, config, run_main):
    result = run_main(train.main, *flags(**vars(config) | {"eval_interval": 2}))
    (begun,) = wandb.begun
    assert (begun["project"], begun["name"], begun["dir"]) == ("nanoladder", "run", config.out_dir)
    assert begun["config"].keys() == vars(config).keys() and begun["settings"]["finish_timeout"]
    assert wandb.logged == rows(config) and len(wandb.logged) == 6 and wandb.ended == [0]
    assert "wandb: https://wandb.test/run-1\n" in result.out and result.err == ""


def test_wandb_hears_of_a_crash(config, wandb, monkeypatch):
    monkeypatch.setattr(train, "evaluate", fail)
    with pytest.raises(ConnectionError):
        train.train(replace(config, eval_interval=4))
    assert wandb.ended == [1] and len(wandb.logged) == 3


@pytest.mark.parametrize("lacking, reason", [("key", "no API key; `wandb login` stores one"), ("accepts", "no route")])
def test_wandb_that_cannot_be_reached_records_offline(lacking, reason, wandb, config, run_main):
    setattr(wandb, lacking, False)
    result = run_main(train.main, *flags(**vars(config)))
    assert result.code == 0 and f"recorded offline: {reason}" in result.err and "wandb sync run-1" in result.out
    assert wandb.begun[-2] == "teardown"  # a failed init() leaves the id in use
    assert wandb.begun[-1]["settings"] == {"silent": True, "mode": "offline"}  # with none of the network's limits
    assert len(wandb.logged) == 6


@pytest.mark.parametrize("trouble", ["init", "log", "finish"])
@pytest.mark.parametrize("misbehave", [fail, sys.exit])
def test_wandb_that_fails_is_a_warning(trouble, misbehave, wandb, config, run_main, monkeypatch):
    begin = wandb.init

    def init(**given):
        run = begin(**given)
        if trouble == "init":
            misbehave()
        setattr(run, trouble, misbehave)
        return run

    wandb.init = init
    result = run_main(train.main, *flags(**vars(config)))
    assert result.code == 0 and len(rows(config)) == 6
    assert result.err.count("warning: wandb failed, but training did not") == 1


def run_python(config, folder, **environment):
    folders = {f"WANDB_{kind}_DIR": str(folder / "wandb") for kind in ("DATA", "CACHE", "CONFIG")}
    code = "import train; from nanoladder.run import tracker; tracker.TIMEOUT = 1; train.main"
    code += f"({flags(**vars(config))!r})"
    environment = {**os.environ, **folders, **environment}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_wandb_for_real_offline_and_with_a_server_that_never_answers(config, tmp_path):
    result = run_python(config, tmp_path, WANDB_MODE="offline")
    assert result.returncode == 0 and "wandb sync" in result.stdout and result.stderr == "", result.stderr
    again = replace(config, out_dir=f"{config.out_dir} 2")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and that is all
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        result = run_python(again, tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY="0" * 40)
    assert result.returncode == 0 and "wandb cannot be reached" in result.stderr, result.stderr
    for run in (config, again):
        assert len(rows(run)) == 6 and list(Path(run.out_dir, "wandb", "latest-run").glob("run-*.wandb"))
