"""Which part of a whole tensor each process holds: computed for all, equal to what each of them has."""

import math

import pytest
import torch
from conftest import build, tiny
from hypothesis import given
from hypothesis import strategies as st

from lab.predict.simulated_rank import one_of
from nanoladder import parallel
from nanoladder.parallel import Division, Sizes, boxes

SHAPES = [(24,), (24, 10), (25, 7), (3, 2), (1, 9)]


@given(st.sampled_from(SHAPES), *[st.integers(1, 5)] * 2, *[st.sampled_from([None, 0, 1])] * 2, st.booleans())
def test_every_number_of_a_tensor_is_held_once(shape, shard, tensor, shard_dim, tensor_dim, fused):
    cuts = [None if dim is None else min(dim, len(shape) - 1) for dim in (shard_dim, tensor_dim)]
    is_fused = fused and cuts[1] == 0 and not shape[0] % (3 * tensor)
    division, sizes = Division(shape, *cuts, is_fused), Sizes(1, shard, tensor)
    whole, counts = torch.arange(math.prod(shape)).view(shape), torch.zeros(shape)
    for i in range(1 if cuts[0] is None else shard):
        for j in range(1 if cuts[1] is None else tensor):
            ranges = division.ranges(sizes, i, j)
            part = torch.full([sum(map(len, each)) for each in ranges], -1)
            for here, there in boxes(ranges):
                assert (part[here] == -1).all()
                part[here] = whole[there]
                counts[there] += 1
            assert (part >= 0).all()
    assert (counts == 1).all()


MANY = 4096
MODEL = {"n_layer": 2, "n_head": 8, "n_embd": 64, "vocab_size": 320, "bias": True}
SIZE = 2 * (12 * 64**2 + 13 * 64) + 2 * 64 + (320 + 16) * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys, n_holders, most",
    [({"shard": "full", "tensor_parallel": 8}, 512, 482), ({"shard": "hybrid"}, 8, SIZE // 8)],
    ids=str,
)
def test_each_of_4096_processes_saves_its_part_and_all_of_them_the_whole_once(keys, n_holders, most):
    """Simulated processes hold what the plan, which any process computes, says of their number.

    Of 512 shards of an eighth of each matrix, the first have a row of each, most have none.
    """
    config = tiny(ddp=True, batch_size=MANY, **MODEL, **keys)
    for rank in (0, 77, MANY - 1):
        with one_of(MANY, rank, config, "cpu"):
            weights = {name: weight for name, weight in build(config)[0].state_dict().items() if name != parallel.COPY}
            own, number = parallel.WholeTensors(weights).own(), parallel.holder()
            saved = plan(weights)
        assert {name: tuple(tensor.shape) for name, tensor in own.items()} == saved.get(number, {})
    sizes = [sum(map(math.prod, pieces.values())) for pieces in saved.values()]
    assert (sum(sizes), len(sizes), max(sizes)) == (SIZE, n_holders, most)


def plan(weights):
    """{number of a holder: {name of a piece: its shape}} of all processes, as any one of them computes it."""
    sizes, found = parallel.sizes(), {}
    for name, (_, division) in parallel.WholeTensors(weights).divisions.items():
        for shard in range(1 if division.shard is None else sizes.shard):
            for tensor in range(1 if division.tensor is None else sizes.tensor):
                for _, there in boxes(division.ranges(sizes, shard, tensor)):
                    shape = tuple(each.stop - each.start for each in there)
                    found.setdefault(shard * sizes.tensor + tensor, {})[parallel.box_name(name, there)] = shape
    return found
