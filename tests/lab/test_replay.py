"""Replaying a step of a run repeats it exactly and names the modules with non-finite values."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import at_step, contents, flags, rows, saved, spoil_positions, spy, tiny

import train
from lab import replay
from nanoladder import checkpoint


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), max_steps=20, save_interval=2, log_interval=5)


def words(config, **keys):
    given = {"dataset": config.dataset, "out_dir": config.out_dir, "max_steps": 20, "save_interval": 2}
    return flags(**given | {"log_interval": 5} | keys)


DIVERGING = {"learning_rate": 1e19, "min_lr": 1e19, "warmup_steps": 0, "dropout": 0.1, "save_interval": 1}


def test_the_command_that_a_fault_names_replays_its_step_and_writes_nothing(config, run_main):
    fault = run_main(train.main, *words(config, **DIVERGING)).err
    files = contents(Path(config.out_dir))
    _, _, module, *command = shlex.split(fault.rpartition("To find its origin: ")[2])
    result = run_main(replay.main, *command)
    assert result.code == 0 and module == "lab.replay" and contents(Path(config.out_dir)) == files
    step, loss, norm = re.search(r"stopped at step (\d+): loss (\S+), gradient norm (\S+),", fault).groups()
    assert f"step {step}: loss {loss}, gradient norm {norm}, learning rate 1e+19" in result.out
    assert re.search(r"replaying steps \d+ to \d+, from step \d+", result.out)
    assert re.search(r"not finite in the backward: (?!nothing)", result.out)


@pytest.mark.parametrize(
    "keys", [{}, pytest.param({"compile": True, "n_layer": 1, "micro_batch_size": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_replay_names_the_first_modules_and_prints_the_sequences(keys, config, run_main, monkeypatch, traced):
    monkeypatch.setattr(train, "train_step", at_step(7, spoil_positions))
    run_main(train.main, *words(config, **keys))
    monkeypatch.setattr(train, "train_step", at_step(1, spoil_positions))  # the seventh, the first after the checkpoint
    result = run_main(replay.main, *words(config, **keys), "--step", 7)
    assert "replaying steps 7 to 7, from step 6" in result.out
    assert "not finite in the forward: position_embedding, dropout, blocks.0" in result.out
    assert result.out.count("  loss ") == config.batch_size and "step 7: loss nan" in result.out


def test_the_inspected_step_is_not_a_captured_graph_which_would_call_no_hooks(config, run_main, monkeypatch):
    given, captured = words(config, save_interval=5, cuda_graph=True), []
    run_main(train.main, *given)
    spy(monkeypatch, train, "train_step", lambda *arguments: captured.append(arguments[-1].cuda_graph))
    assert run_main(replay.main, *given, "--step=7").code == 0
    assert captured == [True] * 6 + [False]


def test_a_replay_of_a_sound_step_is_the_step_that_was_logged(config, run_main):
    keys = {"dropout": 0.2, "micro_batch_size": 2}
    assert run_main(train.main, *words(config, **keys)).code == 0
    logged = {row["step"]: row for row in rows(config)}[10]
    result = run_main(replay.main, *words(config, **keys), "--step=10")
    assert f"gradient norm {logged['grad_norm']}" in result.out
    for stage in ("forward", "backward", "update"):
        assert f"not finite in the {stage}: nothing\n" in result.out


def test_a_damaged_checkpoint_is_named_and_without_it_an_earlier_start_is_taken(config, run_main):
    given = words(config)
    run_main(train.main, *given)
    damaged = Path(config.out_dir, "step_00000018.safetensors")
    damaged.write_bytes(b"half")
    result = run_main(replay.main, *given, "--step=20")
    assert result.code == 2 and f"error: {damaged} is damaged" in result.err
    damaged.unlink()
    assert "replaying steps 1 to 20, from the beginning" in run_main(replay.main, *given, "--step=20").out


@pytest.mark.parametrize("start", ["scratch", "hf"])
def test_a_step_before_the_first_checkpoint_is_replayed_from_the_beginning(start, config, trained, tmp_path, run_main):
    if start == "hf":
        checkpoint.interop.write_huggingface(tmp_path / "hf", saved(trained))
        start = f"hf:{tmp_path}/hf"
    given = words(config, save_interval=10, log_interval=1, init_from=start)
    assert run_main(train.main, *given).code == 0
    result = run_main(replay.main, *given, "--step=3")
    assert "replaying steps 1 to 3, from the beginning" in result.out
    assert f"step 3: loss {rows(config)[2]['train_loss']}, " in result.out
