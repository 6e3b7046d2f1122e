"""The mesh: which process has which part, and what cannot be divided. No test here starts a process."""

import itertools
import re

import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from model import GPT
from nanoladder.arithmetic import STAGES, Grid, count_sharing, divide, micro_batch_sizes, predict_bubble
from nanoladder.config import check as check_config
from nanoladder.errors import BadInput
from nanoladder.parallel import checks, context, pipeline
from nanoladder.parallel.mesh import Mesh

CPU, PIPELINE = torch.device("cpu"), {"pipeline_parallel": 2, "batch_size": 8, "micro_batch_size": 2}


@given(st.tuples(*[st.sampled_from([1, 2, 3])] * 4))
def test_data_takes_what_the_other_dimensions_leave_and_every_process_has_its_own_place(sizes):
    grid = Grid(*sizes)
    n = grid.pipeline * grid.data * grid.context * grid.tensor
    keys = {f"{name}_parallel": getattr(grid, name) for name in ("pipeline", "context", "tensor")}
    assert divide(tiny(**keys), n) == grid and divide(tiny(**keys), 1) == Grid()
    places = [Mesh(grid, rank).place for rank in range(n)]
    assert places == list(itertools.starmap(Grid, itertools.product(*map(range, sizes))))  # tensor groups are neighbors


def test_the_mesh_prints_only_its_dimensions_of_several_processes():
    assert str(Grid(pipeline=2, data=2, tensor=4)) == "2 data × 2 pipeline × 4 tensor"


@pytest.mark.parametrize(
    "keys, n, per_node, expected",
    [
        ({}, 16, 8, 16),
        ({"shard": "hybrid"}, 16, 8, 8),
        ({"shard": "hybrid", "tensor_parallel": 8}, 16, 8, 1),
        ({"shard": "hybrid", "tensor_parallel": 8}, 16, 4, 1),
        ({"shard": "hybrid", "pipeline_parallel": 4}, 16, 8, 4),  # a stage has half a node
        ({"shard": "hybrid", "pipeline_parallel": 2}, 24, 8, 4),  # and one and a half
        ({"shard": "none"}, 16, 8, 1),
    ],
)
def test_processes_that_share_a_copy_are_those_of_a_node(keys, n, per_node, expected):
    config = tiny(n_head=8, **{"shard": "full", **keys})
    assert count_sharing(config, divide(config, n), per_node) == expected


def refuse(keys, sizes, device=CPU):
    """Runs all checks that precede training in several processes."""
    config = tiny(**{"ddp": True, **keys})
    check_config(config)
    checks.check_processes(config, device, 2, 2)
    checks.check_grid(config, sizes, device)


@pytest.mark.parametrize(
    "keys, sizes, expected",
    [
        ({"batch_size": 10}, Grid(data=4), "among 4 processes in micro-batches of 1; expected a multiple of 4"),
        ({"batch_size": 8, "micro_batch_size": 2}, Grid(data=3), "in micro-batches of 2; expected a multiple of 6"),
        ({"optimizer_in_backward": True, "grad_clip": 0.0}, Grid(data=2), "expected --optimizer_in_backward=False"),
        ({**PIPELINE, "batch_size": 1, "micro_batch_size": 0}, Grid(2), "expected a --batch_size of 2 or more"),
        (
            {**PIPELINE, "batch_size": 6, "n_layer": 4, "pipeline_schedule": "interleaved"},
            Grid(2),
            "takes 2 micro-batches or a multiple of it, and micro_batch_size=2 makes 3; expected --micro_batch_size=3",
        ),
        ({**PIPELINE, "n_layer": 1}, Grid(2), "2 stages of at least one block, but n_layer=1; expected n_layer=2 at"),
        ({**PIPELINE, "dtype": "float16"}, Grid(2), "as float16 needs (dtype=float16); expected --dtype="),
        ({**PIPELINE, "optimizer": "galore"}, Grid(2, data=2), "in 2 data × 2 pipeline processes"),
        ({"tensor_parallel": 2, "optimizer": "adamw8bit"}, Grid(tensor=2), "adamw8bit does not work in 2 tensor"),
        ({"tensor_parallel": 2, "optimizer": "galore"}, Grid(tensor=2), "expected --optimizer=adamw"),
        ({"context_parallel": 2, "context_length": 15}, Grid(context=2), "into 2 pieces"),
        ({"context_parallel": 2, "n_head": 1, "context_length": 18, "attention": "sdpa"}, Grid(context=2), "4 pieces"),
        ({"context_parallel": 2, "n_head": 1, "attention": "matmul"}, Grid(context=2), "expected --attention=sdpa"),
    ],
    ids=str,
)
def test_what_several_processes_cannot_train_is_refused(keys, sizes, expected):
    with pytest.raises(BadInput, match=re.escape(expected)) as refused:
        refuse(keys, sizes)
    assert "\n" not in str(refused.value)


def test_indivisible_sizes_are_refused(monkeypatch):
    with pytest.raises(BadInput, match="tensor_parallel=4 does not divide 6 processes; expected a multiple of 4"):
        divide(tiny(tensor_parallel=4), 6)
    monkeypatch.setattr(checks, "mesh", lambda: Mesh(Grid(data=2), n_sharing=2))
    with pytest.raises(BadInput, match=r"position_embedding\.weight has 15"):
        checks.check_8_bits(GPT(tiny(vocab_size=8, context_length=15)))


def test_divisible_sizes_are_accepted():
    refuse({"batch_size": 16, "micro_batch_size": 4}, Grid(data=8))
    refuse({**PIPELINE, "n_layer": 4, "batch_size": 12, "micro_batch_size": "auto"}, Grid(4))
    assert micro_batch_sizes(tiny(batch_size=12), Grid(4)) == [1, 2, 3]
    assert micro_batch_sizes(tiny(batch_size=12, pipeline_schedule="interleaved"), Grid(4)) == [1, 3]


@pytest.mark.parametrize("n_head, n, T", [(4, 2, 12), (4, 4, 12), (3, 4, 24), (2, 4, 16), (1, 2, 4)])
def test_every_position_has_one_process_and_pairs_are_balanced_if_keys_are_gathered(n_head, n, T, monkeypatch):
    found = []
    for rank in range(n):
        monkeypatch.setattr(context, "mesh", lambda rank=rank: Mesh(Grid(context=n), rank))
        found.append(context.positions(tiny(n_head=n_head, n_embd=12, context_length=T, context_parallel=n)))
    assert sorted(torch.cat(found).tolist()) == list(range(T))
    pairs = [int((own + 1).sum()) for own in found]  # a query attends to its own position and all before
    assert (len(set(pairs)) == 1) == (n_head % n > 0)


# -- the cut of a pipeline


def test_the_bubble_is_that_of_the_papers():
    bubbles = {name: [predict_bubble(name, p, m) for p, m in ((2, 4), (4, 8))] for name in STAGES}
    assert bubbles == {"1f1b": [1 / 5, 3 / 11], "interleaved": [1 / 9, 3 / 19]}


@given(n_layer=st.integers(2, 9), n=st.integers(2, 4), vocab_size=st.sampled_from([17, 500, 2000]))
def test_no_cut_has_a_faster_slowest_stage(n_layer, n, vocab_size):
    n = min(n, n_layer)
    config = tiny(n_layer=n_layer, vocab_size=vocab_size, pad_vocab_to=1)
    C, T = config.n_embd, config.context_length
    head = 6 * C * vocab_size / (72 * C * C + 12 * C * T)
    cuts = [(0, *cut, n_layer) for cut in itertools.combinations(range(1, n_layer), n - 1)]

    def slowest(sizes):
        return max(*sizes[:-1], sizes[-1] + head)

    ours = pipeline.cut_blocks(config, n)
    assert [i for blocks in ours for i in blocks] == list(range(n_layer)) and len(ours) == n and all(ours)
    best = min(slowest([b - a for a, b in itertools.pairwise(cut)]) for cut in cuts)
    assert slowest([len(blocks) for blocks in ours]) == pytest.approx(best)
