"""Advice to a run that is short of memory: the peak, its parts, and changes that reduce it, with their cost."""

import json
from pathlib import Path

import pytest
from conftest import flags, replace, tiny

from lab import advise, predict
from nanoladder import machine
from nanoladder.errors import BadInput

SMALL = {"n_layer": 1, "n_head": 4, "n_embd": 128, "context_length": 128, "batch_size": 8, "attention": "sdpa"}


@pytest.fixture
def config(dense):
    return tiny(**SMALL, dataset=str(dense), vocab_size=100)


@pytest.fixture(autouse=True)
def no_torchao(monkeypatch):
    """Its update is compiled, which takes a second for each prediction."""

    def refuse():
        raise BadInput("optimizer=adamw8bit needs torchao")

    monkeypatch.setattr(machine, "require_torchao", refuse)


def savings(config, available=0, device="cpu", world_size=1):
    """{key: predicted peak} of the advice, in its order."""
    found = advise.answer("savings", replace(config, device=device), available, world_size)
    return {key: (value, peak) for key, value, peak in found["savings"]}


def test_the_cheapest_changes_come_first_and_only_those_that_are_not_made(config):
    naive = replace(config, attention="matmul", vocab_size=2000)
    order = ["set_to_none", "attention", "dtype", "loss_chunks", "micro_batch_size", "checkpointing", "optimizer"]
    found = savings(naive, 45_000_000, "cuda")
    assert list(found) == [key for key in order if key in found]
    assert set(order) - set(found) <= {"set_to_none", "loss_chunks", "optimizer"}
    now = predict.predict_memory(naive, "cuda").peak
    for key, (value, peak) in found.items():
        changed = replace(naive, **{key: value})
        assert peak == pytest.approx(predict.predict_memory(changed, "cuda").peak, rel=1e-3) and peak < 0.99 * now
    applied = replace(naive, **{key: value for key, (value, _) in found.items()})
    assert not set(savings(applied, 10**12, "cuda")) - {"micro_batch_size"}


def test_the_micro_batch_that_is_advised_is_the_largest_that_fits(config):
    peaks = {size: predict.predict_memory(replace(config, micro_batch_size=size)).peak for size in (1, 2, 4)}
    assert savings(config, peaks[4])["micro_batch_size"] == (4, peaks[4])
    assert savings(config, peaks[4] - 1)["micro_batch_size"] == (2, peaks[2])
    assert savings(config, 1000)["micro_batch_size"] == (1, peaks[1])  # the least, though it does not fit either
    assert "micro_batch_size" not in savings(replace(config, micro_batch_size=1), peaks[4])
    assert "micro_batch_size" not in savings(replace(config, micro_batch_size="auto"), peaks[4])  # auto is 1


def test_sharding_is_advised_to_several_processes_only(config):
    large = replace(config, n_embd=512)
    assert "shard" not in savings(large) and "shard" in savings(large, world_size=4)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_parts_add_up_to_the_peak(set_to_none, config):
    """Gradients that are dropped between steps are no part of their own: they are within the temporary one."""
    found = advise.answer("savings", replace(config, set_to_none=set_to_none), 0)
    assert sum(found["parts"].values()) == pytest.approx(found["peak"], rel=1e-3)
    assert ("gradients" in found["parts"]) != set_to_none


def test_the_command_prints_one_line_of_json(config, run_main):
    """vocab_size=0 stands for the dataset's vocabulary."""
    given = vars(config) | {"vocab_size": 0, "batch_size": 24}
    vocab_size = json.loads(Path(config.dataset, "meta.json").read_text())["vocab_size"]
    resolved = replace(config, vocab_size=vocab_size, batch_size=24)
    for question in ("savings", "micro_batch_size"):
        options = [question, "--available_bytes=40000000", "--world_size=2"]
        result = run_main(advise.main, *options, *flags(**given))
        expected = advise.answer(question, resolved, 40_000_000, 2)
        assert result.code == 0 and result.out == json.dumps(expected) + "\n" and result.err == ""
