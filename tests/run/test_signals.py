"""A run that receives a signal saves before it ends, and resumes exactly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, at_step, flags, replace, rows, same, saved, tiny, weights

import train

LOGGED = "step", "tokens", "train_loss", "grad_norm", "lr"
NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), max_steps=9, log_interval=4, dropout=0.2)


def send(*numbers):
    """An action that sends these signals to this process."""
    return lambda *_: [os.kill(os.getpid(), number) for number in numbers]


def raises(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_run_after_its_step_saved_and_it_resumes_exactly(number, config, tmp_path, monkeypatch):
    whole = replace(config, out_dir=str(tmp_path / "whole"))
    train.train(whole)
    before = [signal.getsignal(each) for each in NUMBERS]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(train, "train_step", at_step(6, send(number)))
        train.train(config)
    assert ended.value.code == 128 + number and saved(config)["progress"]["step"] == 6
    assert [signal.getsignal(each) for each in NUMBERS] == before
    train.train(replace(config, init_from="auto"))
    assert rows(config, *LOGGED) == rows(whole, *LOGGED)
    assert same(weights(config), weights(whole))


def test_a_run_that_never_saves_names_no_checkpoint(config, monkeypatch, run_main):
    monkeypatch.setattr(train, "train_step", at_step(3, send(signal.SIGTERM)))
    result = run_main(train.main, *flags(dataset=config.dataset, out_dir=config.out_dir, save_interval=0))
    assert result.code == 143 and result.out.endswith("SIGTERM: ended after step 3\n")
    assert not list(Path(config.out_dir).glob("*.safetensors"))


def test_a_second_ctrl_c_does_not_wait_for_the_step(config, monkeypatch):
    monkeypatch.setattr(train, "train_step", at_step(1, send(signal.SIGINT, signal.SIGINT)))
    monkeypatch.setattr(train, "forward_backward", raises(AssertionError("it went on")))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        train.train(config)
    assert ended.value.code == 130 and not list(Path(config.out_dir).glob("*.safetensors"))


# -- a real process

SCRIPT = """
import sys, time, train
original = train.train_step
def step(*args):
    print("step", flush=True)
    time.sleep(1)
    return original(*args)
train.train_step = step
train.run_script(train.main)
"""


@pytest.mark.slow
def test_signals_to_the_whole_group_leave_the_loader_s_workers_to_the_end(config):
    """Ctrl-C in a terminal, torchrun and SLURM send such signals."""
    words = flags(dataset=config.dataset, out_dir=config.out_dir, max_steps=1000, num_workers=2)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(2):
        while process.stdout.readline() != "step\n":
            assert process.poll() is None, process.stderr.read()
    for number in NUMBERS:
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=300)
    ended_by = signal.Signals(process.returncode - 128)  # the last signal seen at the end of the step
    assert ended_by in NUMBERS and "Traceback" not in err
    assert [err.count(f"{number.name} received: the run ends after this step") for number in NUMBERS] == [1, 1, 1]
    step = saved(config)["progress"]["step"]
    assert f"{ended_by.name}: ended after step {step}\n{config.out_dir}/last.safetensors is the newest" in out
    with pytest.raises(ProcessLookupError):  # no process is left
        until = time.monotonic() + 100
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
