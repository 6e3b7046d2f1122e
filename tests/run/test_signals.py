"""A run that receives a signal saves before it ends, and resumes exactly."""

import contextlib
import itertools
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, at_step, flags, replace, rows, same, saved, tiny, weights

import train

LOGGED = "step", "tokens", "train_loss", "grad_norm", "lr"
NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


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


@pytest.fixture(autouse=True)
def hangup_is_not_ignored():
    """As it is if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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


def after_step(number, batches, action):
    """Replaces train.training_batches by a version that calls the action while the run waits for the next batch."""

    def wait(split, config, first_step, device):
        for step, batch in enumerate(batches(split, config, first_step, device), first_step):
            if step == number + 1:
                action()
            yield batch

    return wait


def evaluate_and(evaluate, action):
    def evaluation(*args):
        action()
        return evaluate(*args)

    return evaluation


@pytest.mark.parametrize("place", ["wait", "evaluation"])
def test_a_signal_ends_a_wait_for_a_batch_and_comes_before_the_next_step(place, config, tmp_path, monkeypatch):
    whole = replace(config, out_dir=str(tmp_path / "whole"), eval_interval=3, max_steps=5)
    config = replace(whole, out_dir=config.out_dir)
    train.train(whole)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        if place == "wait":
            action = lambda: (send(signal.SIGTERM)(), time.sleep(20), pytest.fail("waited"))  # noqa: E731
            patch.setattr(train, "training_batches", after_step(3, train.training_batches, action))
        else:
            patch.setattr(train, "evaluate", evaluate_and(train.evaluate, send(signal.SIGTERM)))
        train.train(config)
    assert ended.value.code == 143 and saved(config)["progress"]["step"] == 3
    train.train(replace(config, init_from="auto"))
    assert rows(config, *LOGGED) == rows(whole, *LOGGED)
    assert same(weights(config), weights(whole))


def test_a_signal_before_the_first_step_saves_nothing(config, monkeypatch):
    monkeypatch.setattr(train, "training_batches", after_step(0, train.training_batches, send(signal.SIGTERM)))
    with pytest.raises(SystemExit) as ended:
        train.train(config)
    assert ended.value.code == 143 and not list(Path(config.out_dir).glob("*.safetensors"))


@pytest.mark.parametrize("sent_by_torchrun", [False, True])
def test_an_ignored_hangup_does_not_end_a_run_unless_torchrun_sends_it(sent_by_torchrun, config, monkeypatch):
    if sent_by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    monkeypatch.setattr(train, "train_step", at_step(3, send(signal.SIGHUP)))
    with pytest.raises(SystemExit) if sent_by_torchrun else contextlib.nullcontext():
        train.train(config)
    assert saved(config)["progress"]["step"] == (3 if sent_by_torchrun else config.max_steps)


def test_a_full_shared_memory_ends_a_run_saved_with_its_cure(config, monkeypatch):
    """PyTorch's error of a full /dev/shm, raised in the loader's worker."""
    share, calls = torch.Tensor.share_memory_, itertools.count(1)

    def fill(tensor):
        if next(calls) > 2 * 4:
            raise RuntimeError("unable to allocate shared memory(shm) for file </x>: No space left on device (28)")
        return share(tensor)

    monkeypatch.setattr(torch.Tensor, "share_memory_", fill)
    with pytest.raises(SystemExit, match=r"^error: shared memory \(/dev/shm\) has no room .*--num_workers=0"):
        train.train(replace(config, num_workers=1))
    assert saved(config)["progress"]["step"] == 3  # the next batch is fetched before a step


def test_a_run_that_never_saves_names_no_checkpoint(config, monkeypatch, run_main):
    monkeypatch.setattr(train, "train_step", at_step(3, send(signal.SIGTERM)))
    result = run_main(train.main, *flags(dataset=config.dataset, out_dir=config.out_dir, save_interval=0))
    assert result.code == 143 and result.out.endswith("SIGTERM: ended after step 3\n")
    assert not list(Path(config.out_dir).glob("*.safetensors"))


def test_a_second_ctrl_c_does_not_wait_for_the_step_as_the_first_one_s_line_says(config, monkeypatch, capfd):
    monkeypatch.setattr(train, "train_step", at_step(1, send(signal.SIGINT, signal.SIGINT)))
    monkeypatch.setattr(train, "forward_backward", raises(AssertionError("it went on")))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        train.train(config)
    assert ended.value.code == 130 and not list(Path(config.out_dir).glob("*.safetensors"))
    line = "SIGINT received: the run ends after this step; a second Ctrl-C ends it at once, unsaved\n"
    assert line in capfd.readouterr().err


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
    assert [err.count(f"{number.name} received: the run ends after this step") for number in NUMBERS] == [1] * 4
    step = saved(config)["progress"]["step"]
    assert f"{ended_by.name}: ended after step {step}\n{config.out_dir}/last.safetensors is the newest" in out
    with pytest.raises(ProcessLookupError):  # no process is left
        until = time.monotonic() + 100
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_saved(config):
    """The kernel sends SIGHUP, and from then on the terminal refuses all output."""
    words = flags(dataset=config.dataset, out_dir=config.out_dir, max_steps=1000)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT, *words])
    seen = b""
    while seen.count(b"step\r\n") < 2:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert saved(config)["progress"]["step"] == len(rows(config)) >= 1
