"""The mesh: which process has which part. Nothing here starts a process."""

import itertools
import re

import pytest
from conftest import tiny

from nanoladder.errors import BadInput
from nanoladder.parallel.mesh import Grid, Mesh, count_sharing, divide


def grid(n, **keys):
    return divide(tiny(n_head=8, **keys), n)


def test_data_is_what_the_other_dimensions_leave():
    assert grid(4) == Grid(data=4)
    assert grid(16, tensor_parallel=4, pipeline_parallel=2) == Grid(pipeline=2, data=2, tensor=4)
    assert grid(8, tensor_parallel=2, context_parallel=4) == Grid(context=4, tensor=2)


def test_one_process_has_every_part():
    assert grid(1, tensor_parallel=4, pipeline_parallel=2, context_parallel=2) == Grid()


def test_the_mesh_is_drawn_by_its_dimensions_of_several_processes():
    assert str(grid(16, tensor_parallel=4, pipeline_parallel=2)) == "2 data × 2 pipeline × 4 tensor"
    assert str(grid(4, context_parallel=4)) == "4 context"


@pytest.mark.parametrize(
    "n, keys, expected",
    [
        (6, {"tensor_parallel": 4}, "tensor_parallel=4 does not divide 6 processes; expected 4 or 8 of them"),
        (2, {"tensor_parallel": 4}, "does not divide 2 processes; expected 4 of them"),
        (
            9,
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            "pipeline_parallel=2 × tensor_parallel=2 does not divide 9 processes; expected 8 or 12 of them",
        ),
    ],
)
def test_a_product_that_does_not_fit_is_refused_with_the_nearest_that_do(n, keys, expected):
    with pytest.raises(BadInput, match=re.escape(expected)):
        grid(n, **keys)


def test_every_process_has_a_place_of_its_own_and_tensor_groups_are_neighbors():
    sizes = Grid(pipeline=2, data=3, context=2, tensor=4)
    places = [Mesh(sizes, rank).place for rank in range(48)]
    assert places == list(itertools.starmap(Grid, itertools.product(range(2), range(3), range(2), range(4))))
    assert len({place[:3] for place in places[:4]}) == 1


@pytest.mark.parametrize(
    "keys, n, per_node, expected",
    [
        ({}, 16, 8, 16),
        ({"shard_within": "node"}, 16, 8, 8),
        ({"shard_within": "node"}, 4, 8, 4),
        ({"shard_within": "node", "tensor_parallel": 2}, 16, 8, 4),
        ({"shard_within": "node", "tensor_parallel": 8}, 16, 8, 1),
        ({"shard_within": "node", "pipeline_parallel": 4}, 16, 8, 4),  # a stage has half a node
        ({"shard_within": "node", "context_parallel": 2}, 16, 8, 8),
        ({"shard_within": 2}, 16, 8, 2),
        ({"shard": "none"}, 16, 8, 1),
    ],
)
def test_processes_that_share_a_copy_are_those_of_a_node(keys, n, per_node, expected):
    config = tiny(n_head=8, **{"shard": "full", **keys})
    assert count_sharing(config, divide(config, n), per_node) == expected


def test_a_number_that_cannot_share_is_refused_with_those_that_can():
    config = tiny(shard="full", shard_within=4)
    with pytest.raises(BadInput, match=re.escape("shard_within=4 does not divide the 6 processes")) as refused:
        count_sharing(config, divide(config, 6), 6)
    assert "expected one of 1, 2, 3, 6, or 0 for all" in str(refused.value)
