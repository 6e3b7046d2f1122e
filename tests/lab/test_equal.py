"""lab.equal: every layout trains the same model as one process, and a layout that does not is found and named."""

import math
import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import flags, replace, tiny

import train
from lab import equal
from lab.layouts import describe, layouts
from nanoladder import checkpoint, parallel
from nanoladder.config import check

LIMITS = {"losses": 1e-4, "norms": 2e-3, "weights": 1e-4}
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 36, "context_length": 24, "batch_size": 8, "bias": True}


# -- judging


def run(**planted):
    """A row of a run that equals another run()."""
    row = {"name": "2 data", "note": None, "losses": [5.0, 4.0, 3.0], "norms": [1.0, 2.0, 1.0]}
    return {**row, "weights": {"a": 1e-7, "b": 2e-7}, "changed": [], **planted}


@pytest.mark.parametrize(
    "planted, text",
    [
        ({"losses": [5.0001, 4.0, 3.0]}, ""),
        ({"note": "refused: n_head=2"}, ""),
        ({"losses": [5.0, 4.01, 3.01]}, "WRONG: losses from step 2"),
        ({"losses": [5.0, math.nan, 3.0]}, "WRONG: losses from step 2"),
        ({"norms": [1.0, 2.0, 1.01]}, "WRONG: norms from step 3"),
        ({"weights": {"a": 0.0, "b": 1e-3, "c": 1e-2}}, "WRONG: weights of b, of 2 tensors"),
        ({"weights": {"a": 0.0, "b": math.inf}}, "WRONG: weights of b, of 1 tensors"),
        ({"changed": ["a"]}, "WRONG: the checkpoint's a came back changed"),
        ({"note": "FAILED: ValueError: x"}, "FAILED: ValueError: x"),
    ],
)
def test_a_planted_difference_is_named(planted, text):
    assert equal.judge(run(**planted), run(), LIMITS)["wrong"] == text


def test_distances_name_what_differs_and_leave_out_the_biases_of_keys():
    reference = {"a": torch.zeros(2, 2), "attention.qkv.bias": torch.zeros(6), "lost": torch.zeros(1)}
    ours = {"a": torch.eye(2), "attention.qkv.bias": torch.tensor([0, 0, 9.0, 9.0, 0.5, 0]), "new": torch.zeros(1)}
    found = equal.distances(ours, reference)
    assert found == pytest.approx({"a": 0.5**0.5, "attention.qkv.bias": 0.5**1.5, "lost": math.inf, "new": math.inf})
    assert equal.distances({"a": torch.tensor([math.nan])}, {"a": torch.zeros(1)}) == {"a": math.inf}


@pytest.mark.parametrize("planted, code", [({}, 0), ({"norms": [1.0, 2.0, 1.5]}, 1)])
def test_the_matrix_is_printed_and_a_difference_ends_with_code_1(planted, code, dense, run_main, monkeypatch):
    rows = [run(), run(name="2 tensor", **planted)]
    monkeypatch.setattr(equal, "compare", lambda *_: [equal.judge(row, run(), LIMITS) for row in rows])
    result = run_main(equal.main, *flags(dataset=dense), "--steps=3")
    assert "| 2 tensor " in result.out and ("norms from step 3" in result.out) == bool(code)
    assert result.code == ("error: 1 of 2 layouts differ from one process: 2 tensor" if code else 0)


def test_half_precision_has_larger_tolerances(dense):
    config = tiny(max_steps=2, warmup_steps=2)  # learning rates 0.005 and 0.01
    assert equal.tolerances(config) == pytest.approx({"losses": 1e-4, "norms": 2e-3, "weights": 1e-4})
    half = equal.tolerances(replace(config, dtype="bfloat16"))
    assert half == pytest.approx({"losses": 5e-3, "norms": 0.2, "weights": 0.03})
    for given, taken in {"auto": "float32", "bfloat16": "bfloat16"}.items():
        assert equal.parse(flags(dataset=dense, dtype=given))[0].dtype == taken


# -- the layouts


def test_every_dimension_sharding_and_schedule_is_listed():
    config = tiny(batch_size=8, n_head=4, ddp=True)
    found = layouts(config, 4)
    names = [describe(layout, 4) for layout in found]
    assert len(set(names)) == len(names)
    assert {"4 data, shard=full, shard_within=2", "2 data × 2 tensor, shard=full"} <= set(names)
    assert {"4 data", "4 tensor", "4 context", "4 pipeline, interleaved", "2 pipeline × 2 context, 1f1b"} <= set(names)
    for layout in found:
        check(layout)
    assert [describe(layout, 1) for layout in layouts(config, 1)] == ["1 process", "1 process, micro_batch_size=4"]


# -- planted faults


def one_row_too_many(model, optimizer, batch, *rest, train_step=train.train_step):
    """train_step, of another batch."""
    return train_step(model, optimizer, type(batch)(*(part[[0, 0, 0, 0]] for part in batch)), *rest)


def spoiled(model, *rest, resume=checkpoint.resume):
    """checkpoint.resume, with a weight that is not quite the checkpoint's."""
    progress = resume(model, *rest)
    model.norm.weight.data += 1e-6
    return progress


def wrong_batch(*args):
    """train_in_halves, with one_row_too_many."""
    train.train_step = one_row_too_many
    return equal.train_in_halves(*args)


def wrong_resumption(*args):
    """train_in_halves, with a spoiled checkpoint."""
    checkpoint.resume = spoiled
    return equal.train_in_halves(*args)


def summing(*args):
    """train_in_halves, but gradients are added up where their mean is due."""
    return plant(lambda gradients: gradients)(*args)


def dropping(*args):
    """train_in_halves, but the gradients of rank 1 are lost."""
    return plant(lambda gradients: gradients * (parallel.rank() == 0) / parallel.world_size())(*args)


def plant(spoil, train=equal.train_in_halves):
    data_parallel = parallel.distributed_data_parallel

    def hook(_, bucket):
        dist.all_reduce(bucket.buffer().copy_(spoil(bucket.buffer())))
        reduced = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    def spoiled(model):
        model = data_parallel(model)
        model.register_comm_hook(None, hook)
        return model

    parallel.distributed_data_parallel = spoiled
    return train


@pytest.mark.slow
def test_a_planted_fault_is_found_even_with_the_optimizer_that_amplifies_rounding(dense, tmp_path, monkeypatch):
    config, _ = equal.parse(flags(dataset=dense, optimizer="muon", steps=4))
    reference = equal.train_layout(1, config, tmp_path)
    faults = {
        None: "",
        wrong_batch: "WRONG: losses from step 1; norms from step 1; weights of ",
        wrong_resumption: "the checkpoint's ['norm.weight'] came back changed",
        summing: "norms from step 1",
        dropping: "norms from step 1",
    }
    for fault, text in faults.items():
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(equal, "train_in_halves", fault)
            row = equal.judge(equal.train_layout(2, config, tmp_path), reference, LIMITS)
        assert text in row["wrong"] if fault else not row["wrong"], fault


def pairs(config, n):
    """The layouts of two processes, and of four those along two dimensions, sharded or not."""
    found = layouts(config, n)
    two = [layout for layout in found if re.fullmatch(r"2 \w+ × 2 \w+(, shard=full)?(, 1f1b)?", describe(layout, n))]
    return two if n == 4 else found


@pytest.mark.slow
def test_every_layout_equals_one_process(documents):
    """Every dimension of two processes and every pair: padded documents, an odd vocabulary, biases, heads of 9."""
    config, _ = equal.parse(flags(dataset=documents, vocab_size=257, **SIZES, steps=2))
    with patch.object(equal, "layouts", pairs):
        rows = equal.compare(config, 4, equal.tolerances(config))
    assert not [row for row in rows if row["wrong"] or row["note"]]
    assert len(rows) == 26 and rows[-1]["name"] == "1 process"
    for row in rows:
        assert len(row["losses"]) == 2 and max(row["weights"].values()) < 1e-4, row["name"]
