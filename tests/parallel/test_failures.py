"""If one of several processes fails, is killed or gets a signal, all end properly and resume exactly."""

import os
import re
import resource
import time

import pytest
from conftest import assert_same_state, flags, replace, rows, words
from processes import configuration, torchrun, work

import train
from lab.measure.launch import run_together

pytestmark = pytest.mark.slow

CURVE = "step", "train_loss", "lr", "grad_norm"
PIPELINE = {"pipeline_parallel": 2, "batch_size": 8, "micro_batch_size": 2}


def error_lines(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_what_every_process_refuses_is_reported_once(dense, tmp_path):
    result = torchrun("train.py", *flags(dataset=dense, out_dir=tmp_path / "run", ddp=True, batch_size=5))
    assert result.returncode != 0 and result.stdout == "" and not (tmp_path / "run").exists()
    line = "batch_size=5 does not divide among 2 processes in micro-batches of 1; expected a multiple of 2, "
    line += "or another number of processes"
    assert error_lines(result) == [f"error: {line}"]
    assert result.stderr.count("Traceback") == 1  # torchrun's own; its summary repeats the line
    assert f"traceback : nanoladder.errors.BadInput: {line}" in result.stderr


def test_a_failing_process_ends_the_job_and_its_own_error_comes_first(dense, documents, tmp_path):
    config = configuration(dense, documents, tmp_path / "run", max_steps=1000)
    result, _ = work(tmp_path / "work", {"job": {"argv": words(config), "fault": [1, 3, "raise"]}}, 2, torchrun)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if re.match(r"(\[rank\d\]: )?\w*Error", line)]
    assert errors[0] == "[rank1]: RuntimeError: injected"
    root_cause = result.stderr[result.stderr.index("Root Cause") :]
    assert "injected" in root_cause and re.search(r"rank +: 1", root_cause)


def test_a_gradient_that_overflows_on_one_stage_ends_every_process(dense, documents, tmp_path):
    config = configuration(dense, documents, tmp_path / "run", **PIPELINE)
    result, _ = work(tmp_path / "work", {"job": {"argv": words(config), "fault": [1, 3, "overflow"]}}, 2)
    (line,) = error_lines(result)
    assert result.returncode != 0 and line.startswith("error: stopped at step 3: loss") and "gradient norm inf" in line


def interrupted(dense, documents, folder, kind, n=2, **keys):
    """Trains a run, and the same run with a fault in its last process, under torchrun with one restart.

    Returns both configs, and torchrun's completed process.
    """
    whole = configuration(dense, documents, folder / "whole", dropout=0.2, **{"save_interval": 2, **keys})
    assert work(folder / "undisturbed", {"job": {"argv": words(whole)}}, n)[0].returncode == 0
    ours = replace(whole, out_dir=f"{folder}/ours", init_from="auto")
    jobs = {"job": {"argv": words(ours), "fault": [n - 1, 4, kind]}}
    result, _ = work(folder / "faulty", jobs, n, torchrun, options=["--max-restarts=1"])
    assert result.returncode == 0, result.stderr
    return whole, ours, result


@pytest.mark.parametrize(
    "n, keys",
    [(2, {}), pytest.param(4, {**PIPELINE, "tensor_parallel": 2}, marks=pytest.mark.nightly)],
    ids=["ddp", "parts of the model"],
)
def test_a_job_with_a_killed_process_restarts_and_ends_as_if_uninterrupted(n, keys, dense, documents, tmp_path):
    whole, ours, result = interrupted(dense, documents, tmp_path, "SIGKILL", n, **keys)
    assert "failed (exitcode" in result.stderr and rows(ours, *CURVE) == rows(whole, *CURVE)
    assert_same_state(ours, whole, "model", "optimizer", "generators")


def test_a_signal_to_one_process_ends_all_at_the_same_step_and_they_resume_exactly(dense, documents, tmp_path):
    whole, ours, result = interrupted(dense, documents, tmp_path, "SIGTERM", save_interval=100)
    assert len(re.findall(r"SIGTERM: ended after step \d\n.*is the newest checkpoint", result.stdout)) == 1
    assert rows(ours, *CURVE) == rows(whole, *CURVE)
    assert_same_state(ours, whole, "model", "optimizer", "generators")


def train_without_room(argv, other):
    """Trains; rank 0 cannot write files larger than 50 kB, and rank 1 makes the file `other` at its end.

    Returns the error line and, on rank 0, if rank 1 ends without that rank 0's process ends.
    """
    if os.environ["RANK"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        train.main(argv)
    except SystemExit as stop:
        deadline = time.monotonic() + 30
        while not other.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return stop.code, other.exists()
    other.touch()
    return None


def test_a_checkpoint_that_one_process_cannot_write_is_no_error_of_the_others(dense, documents, tmp_path):
    config = configuration(dense, documents, tmp_path / "run", save_interval=100)
    found = run_together(train_without_room, words(config), tmp_path / "other", n=2, folder=tmp_path, seconds=100)
    line = f"error: {config.out_dir} lacks last.safetensors of step 6, which could not be written"
    assert found == [(line, True), None]
