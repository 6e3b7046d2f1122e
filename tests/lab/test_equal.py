"""lab.equal: every layout trains the same model as one process, and a layout that does not is found and named."""

import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import flags, replace, tiny

import train
from lab import equal, equal_worker
from lab.layouts import Layout, layouts
from nanoladder import checkpoint, parallel
from nanoladder.parallel.mesh import Grid
from nanoladder.run import load_config

LIMITS = {"losses": 1e-4, "norms": 2e-3, "weights": 1e-4}
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 36, "context_length": 24, "batch_size": 8, "bias": True}


# -- judging


def run(**planted):
    """A row as the worker reports it, of a run that equals reference()."""
    row = {"name": "2 data", "resumed_from": None, "losses": [5.0, 4.0, 3.0], "norms": [1.0, 2.0, 1.0]}
    return {**row, "first_step": 1, "weights": {"a": 1e-7, "b": 2e-7}, **planted}


@pytest.mark.parametrize(
    "planted, text",
    [
        ({"losses": [5.0001, 4.0, 3.0]}, ""),
        ({"refused": "n_head=2"}, ""),
        ({"losses": [5.0, 4.01, 3.01]}, "WRONG: losses from step 2"),
        ({"losses": [5.0, math.nan, 3.0]}, "WRONG: losses from step 2"),
        ({"norms": [1.0, 2.0, 1.01]}, "WRONG: norms from step 3"),
        ({"weights": {"a": 0.0, "b": 1e-3, "c": 1e-2}}, "WRONG: weights of b, of 2 tensors"),
        ({"weights": {"a": 0.0, "b": math.inf}}, "WRONG: weights of b, of 1 tensors"),
        ({"changed": ["a"], "resumed_from": "2 tensor"}, "WRONG: the checkpoint's a came back changed"),
        ({"failed": "ValueError: x"}, "FAILED: ValueError: x"),
        ({"first_step": 3, "losses": [3.0], "norms": [1.0], "resumed_from": "2 tensor", "changed": []}, ""),
        ({"first_step": 3, "losses": [3.01], "norms": [1.0]}, "WRONG: losses from step 3"),
    ],
)
def test_a_planted_difference_is_named(planted, text):
    assert equal.judge(run(**planted), run(), LIMITS)["wrong"] == text


def test_distances_name_what_differs_and_leave_out_the_biases_of_keys():
    reference = {"a": torch.zeros(2, 2), "attention.qkv.bias": torch.zeros(6), "lost": torch.zeros(1)}
    ours = {"a": torch.eye(2), "attention.qkv.bias": torch.tensor([0, 0, 9.0, 9.0, 0.5, 0]), "new": torch.zeros(1)}
    found = equal_worker.distances(ours, reference)
    assert found == pytest.approx({"a": 0.5**0.5, "attention.qkv.bias": 0.5**1.5, "lost": math.inf, "new": math.inf})
    assert equal_worker.distances({"a": torch.tensor([math.nan])}, {"a": torch.zeros(1)}) == {"a": math.inf}


@pytest.mark.parametrize("planted, code", [({}, 0), ({"norms": [1.0, 2.0, 1.5]}, 1)])
def test_the_matrix_is_printed_and_a_difference_ends_with_code_1(planted, code, dense, run_main, monkeypatch):
    rows = [run(), run(name="2 tensor", **planted), run(resumed_from="2 tensor")]
    monkeypatch.setattr(equal, "compare", lambda *_: [equal.judge(row, run(), LIMITS) for row in rows])
    result = run_main(equal.main, *flags(dataset=dense), "--steps=3")
    assert "2 tensor   " in result.out and "resumed from 2 tensor" in result.out
    assert ("norms from step 3" in result.out) == bool(code)
    assert result.code == ("error: 1 of 3 runs differ from one process: 2 tensor" if code else 0)


def test_half_precision_has_larger_tolerances():
    config = tiny(max_steps=2, warmup_steps=2)  # learning rates 0.005 and 0.01
    assert equal.tolerances(config) == pytest.approx({"losses": 1e-4, "norms": 2e-3, "weights": 1e-4})
    half = equal.tolerances(replace(config, dtype="bfloat16"))
    assert half == pytest.approx({"losses": 5e-3, "norms": 0.2, "weights": 0.03})


def test_auto_is_float32_on_a_cpu(dense):
    options = SimpleNamespace(processes=2, steps=4)
    for given, taken in {"auto": "float32", "bfloat16": "bfloat16"}.items():
        assert equal.prepare(flags(dataset=dense, dtype=given), options)[0].dtype == taken


# -- the layouts


def test_every_dimension_sharding_and_schedule_is_listed():
    keys = {"batch_size": 8, "n_head": 4}
    config = load_config(flags(**keys))
    names = [layout.name for layout in layouts(config, 4)]
    assert len(set(names)) == len(names)
    assert {"4 data, shard=full, shard_within=2", "2 data × 2 tensor, shard=full"} <= set(names)
    assert {"4 data", "4 tensor", "4 context", "4 pipeline, interleaved", "2 pipeline × 2 context"} <= set(names)
    for layout in layouts(config, 4):
        load_config(flags(**keys) + layout.words)  # is a config
    alone = layouts(config, 1)
    assert [layout.name for layout in alone] == ["1 process", "1 process, micro_batch_size=4"]


# -- planted faults, in one process


def words(dataset, **keys):
    return flags(dataset=dataset, ddp=True, max_steps=4, **keys)


def follow(dataset, folder, **keys):
    return equal_worker.follow(words(dataset, **keys), folder)


def test_a_wrong_gradient_is_found(dense, tmp_path, monkeypatch):
    reference, train_step = follow(dense, tmp_path), train.train_step
    assert not equal.judge({"name": "again", **follow(dense, tmp_path)}, reference, LIMITS)["wrong"]

    def one_row_too_many(model, optimizer, batch, *rest):
        return train_step(model, optimizer, type(batch)(*(part[[0, 0, 0, 0]] for part in batch)), *rest)

    monkeypatch.setattr(train, "train_step", one_row_too_many)
    row = equal.judge({"name": "wrong", **follow(dense, tmp_path)}, reference, LIMITS)
    assert "losses from step 1; norms from step 1; weights of " in row["wrong"]


def test_a_checkpoint_that_is_loaded_wrong_is_found(dense, tmp_path, monkeypatch):
    follow(dense, tmp_path)
    assert equal_worker.pass_on(tmp_path, "1 process") == "1 process"
    resumed = equal_worker.follow(words(dense), tmp_path, resumed=True)
    assert resumed["first_step"] == 3 and resumed["changed"] == []
    resume = checkpoint.resume

    def spoiled(model, *rest):
        progress = resume(model, *rest)
        model.norm.weight.data += 1e-6
        return progress

    monkeypatch.setattr(checkpoint, "resume", spoiled)
    assert equal_worker.follow(words(dense), tmp_path, resumed=True)["changed"] == ["['norm.weight']"]


# -- several processes


def summing(*args):
    """train_layout, but gradients are added up where their mean is due."""
    plant(lambda gradients: gradients)(*args)


def dropping(*args):
    """train_layout, but the gradients of rank 1 are lost."""
    plant(lambda gradients: gradients * (parallel.rank() == 0) / parallel.world_size())(*args)


def plant(spoil, train_layout=equal_worker.train_layout):
    data_parallel = parallel.distributed_data_parallel

    def hook(_, bucket):
        reduced = dist.all_reduce(bucket.buffer().copy_(spoil(bucket.buffer())), async_op=True)
        return reduced.get_future().then(lambda future: future.value()[0])

    def spoiled(model):
        model = data_parallel(model)
        model.register_comm_hook(None, hook)
        return model

    parallel.distributed_data_parallel = spoiled
    return train_layout


@pytest.mark.slow
@pytest.mark.parametrize("planted", [None, summing, dropping])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_wrong_collective_is_found_whatever_the_optimizer(optimizer, planted, dense, tmp_path, monkeypatch):
    reference = follow(dense, tmp_path, optimizer=optimizer)
    if planted:
        monkeypatch.setattr(equal_worker, "train_layout", planted)
    layout = Layout(Grid(data=2), {})
    [row] = equal.train_layout(2, layout, [None], words(dense, optimizer=optimizer), tmp_path, explain=False)
    wrong = equal.judge(row, reference, LIMITS)["wrong"]
    assert "norms from step 1" in wrong if planted else not wrong


def pairs(config, n):
    """The layouts of two processes, and of four those along two dimensions, each in its first form."""
    found = layouts(config, n)
    return found if n < 4 else [layout for layout in found if layout.name == str(layout.grid) and max(layout.grid) == 2]


@pytest.fixture(scope="module")
def matrix(documents):
    """Every dimension of two processes and every pair: padded documents, an odd vocabulary, biases, heads of 9."""
    options = SimpleNamespace(processes=4, steps=2)
    config, given = equal.prepare(flags(dataset=documents, vocab_size=257, **SIZES), options)
    with patch.object(equal, "layouts", pairs):
        return equal.compare(given, 4, explain=True, limits=equal.tolerances(config))


@pytest.mark.slow
def test_every_layout_equals_one_process(matrix):
    resumed = [row for row in matrix if row["resumed_from"]]
    assert not [row["wrong"] for row in matrix if row["wrong"] or "refused" in row]
    assert len(matrix) == 34 and len(resumed) == 14 and resumed[-1]["name"] == "1 process"
    for row in matrix:
        assert len(row["losses"]) == (1 if row["resumed_from"] else 2), row["name"]
        assert max(row["weights"].values()) < 1e-4


@pytest.mark.slow
def test_what_is_sent_is_what_the_formulas_say(matrix):
    for row in matrix:
        for kind in {kind for sent in row.get("sent", []) for kind in sent}:
            measured = sum(sent.get(kind, (0, 0))[1] for sent in row["sent"]) / len(row["sent"])
            assert measured == pytest.approx(row["expected"][kind][0], rel=0.02, abs=1024), (row["name"], kind)


# -- bad input


@pytest.mark.parametrize(
    "given, message",
    [
        ({"dropout": 0.1}, "dropout=0.1: each layout drops other activations; expected --dropout=0"),
        ({"processes": 1}, "--processes=1: expected at least 2"),
        ({"processes": "two"}, "invalid int value: 'two'"),
        ({"steps": 1}, "--steps=1: expected at least 2"),
        ({"step": 3}, "unknown key 'step', did you mean 'steps'?"),
    ],
)
def test_bad_input_is_one_line(given, message, dense, refused):
    assert message in refused(equal.main, *flags(dataset=dense, **given))


def test_torchrun_is_refused(dense, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "lab.equal starts its processes itself" in refused(equal.main, *flags(dataset=dense))
