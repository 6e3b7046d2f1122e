"""Steps on paper: memory beside the traced step, what a layout cuts and sends, layouts that divide and fit."""

import math

import pytest
from conftest import replace

from lab.predict.cluster import CLOSE, NVLINK, fastest, layouts, predict_step, sizes_of
from lab.predict.predict import predict_memory
from nanoladder.arithmetic import divide
from nanoladder.config import Config

SMALL = Config(n_layer=4, n_head=4, n_embd=512, context_length=512, vocab_size=512, batch_size=8, compile=False)
WIDE = replace(SMALL, n_layer=8, n_embd=1024, n_head=16, context_length=1024, micro_batch_size=8, ddp=True)


def step(config, n_gpus):
    return predict_step(config, sizes_of(config), n_gpus)


@pytest.mark.parametrize(
    "keys",
    [{}, {"activation_checkpointing": "every:1"}, {"shard": "full", "vocab_size": 4096, "micro_batch_size": 1}],
    ids=str,
)
def test_memory_on_paper_is_near_that_of_the_traced_step(keys):
    n_gpus = 2 if "shard" in keys else 1
    config = replace(SMALL, **{"micro_batch_size": 8, "ddp": True, **keys})
    workspaces = 65 * 2**20  # of cuBLAS, which the formula leaves out
    expected = predict_memory(config, "cuda", n_gpus).peak - workspaces
    assert step(config, n_gpus).memory == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("name", ["tensor", "context", "pipeline", "data"])
def test_every_part_of_a_step_is_split_as_the_layout_says(name):
    keys = {} if name == "data" else {f"{name}_parallel": 4}
    rows = {"data": 2, "pipeline": 1}.get(name, 8)
    cut = step(replace(WIDE, micro_batch_size=rows, **keys), 4)
    assert cut.compute == pytest.approx(step(WIDE, 1).compute / 4) and cut.seconds > cut.compute
    sent = {kind for kind in ("tensor", "context", "pipeline", "data") if getattr(cut, kind) > 0}
    assert sent == ({"context", "data"} if name == "context" else {name})  # along context all hold the same weights
    assert (cut.bubble > 0) == (name == "pipeline")


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_with_micro_batches_whole_gradients_wait_or_are_reduced_each_time(shard):
    sizes = sizes_of(WIDE)
    sharded = [replace(WIDE, shard=shard, batch_size=16, micro_batch_size=rows) for rows in (2, 1)]
    once, twice = (step(config, 8) for config in sharded)
    others = sizes.n_params - 8 * sizes.block
    gathered = 2 * (2 * sizes.block + others if shard == "full" else sizes.n_params) + 8 * others
    activations = once.memory - 16 * sizes.n_params / 8 - gathered
    waiting = 4 * sizes.n_params if shard == "optimizer" else 0
    assert twice.memory == pytest.approx(once.memory - activations / 2 + waiting)
    assert twice.data == pytest.approx(once.data * (2 if shard == "full" else 1))


@pytest.mark.parametrize("keys", [{"shard": "full"}, {"tensor_parallel": 8}, {"shard": "hybrid"}])
def test_processes_that_divide_the_weights_divide_the_checkpoint(keys):
    config = replace(WIDE, batch_size=16, micro_batch_size=1, **keys)
    n_params, n_copies = sizes_of(config).n_params, 2 if keys == {"shard": "hybrid"} else 1
    n_gpus = 8 * n_copies
    assert step(replace(WIDE, batch_size=8, micro_batch_size=1), 8).saved == 12 * n_params
    assert n_gpus * step(config, n_gpus).saved == pytest.approx(12 * n_params * n_copies)


def test_half_residual_halves_what_a_pipeline_sends_and_what_checkpointing_keeps():
    keys = {"activation_checkpointing": "every:1", "pipeline_parallel": 4, "micro_batch_size": 1}
    whole, half = (step(replace(WIDE, **keys, half_residual=half), 4) for half in (False, True))
    stream = 2 * 1024 * 1024  # bytes of a micro-batch between two blocks, and as many less
    assert whole.pipeline - half.pipeline == pytest.approx(8 * 2 * stream / NVLINK)  # forward and backward
    assert whole.memory - half.memory == stream * (2 * 4 + 2)  # two blocks', four times, and of one that is recomputed


@pytest.mark.parametrize(("n_gpus", "batch_size"), [(64, 512), (24, 192)])
def test_the_fastest_layouts_divide_all_and_fit(n_gpus, batch_size):
    config = replace(WIDE, n_layer=24, n_embd=2048, context_length=2048, batch_size=batch_size)
    sizes = sizes_of(config)
    found = fastest(config, sizes, n_gpus)
    assert found
    for layout, predicted in found:
        assert math.prod(divide(layout, n_gpus)) == n_gpus and predicted.memory <= 72e9
        rows = predicted.n_micro * layout.micro_batch_size
        assert rows * divide(layout, n_gpus).data == batch_size
    assert found[0][1].seconds <= CLOSE * min(predicted.seconds for _, predicted in found)
    assert fastest(config, sizes, n_gpus, memory_gb=0.1) == []


def test_no_plan_has_a_layout_that_is_refused_with_float8():
    cut = {
        float8: any(layout.tensor_parallel > 1 for layout in layouts(replace(WIDE, float8=float8), 8))
        for float8 in (False, True)
    }
    assert cut == {False: True, True: False}
