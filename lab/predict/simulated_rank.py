"""Simulates one process of many, without the others: code that cuts a model runs, but its messages hold no numbers."""

import contextlib
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from nanoladder import parallel
from nanoladder.parallel.mesh import Grid, count_sharing, divide, mesh, start_mesh

PER_NODE = 8  # processes of a node, on which shard=hybrid depends


@contextlib.contextmanager
def one_of(world_size, rank, config, device_type):
    """Makes this process `rank` of world_size for a while. Raises BadInput if the config does not divide among them.

    device_type: the simulated process's; its tensors are on the CPU regardless.
    """
    sizes = divide(config, world_size)
    n_sharing = count_sharing(config, sizes, min(world_size, PER_NODE))
    with contextlib.ExitStack() as stack:
        if world_size > 1:
            stack.enter_context(fake_group(world_size, rank))
            if device_type == "cuda" and config.dtype != "float32":
                stack.enter_context(gathering_in(getattr(torch, config.dtype)))
        start_mesh(sizes, rank, n_sharing, "cpu")
        stack.callback(start_mesh, Grid(), 0, 1, "cpu")
        if world_size > 1:
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            stack.enter_context(without_modes(parallel, "apply_context_parallel"))  # reads the positions of the process
            # DTensor tries each new operator on whole fake tensors, which in a real process take no memory
            stack.enter_context(without_modes(ShardingPropagator, "_propagate_tensor_meta_non_cached"))
            # Before there are fake tensors: a mesh cannot be made from them
            mesh().weights, mesh().context, mesh().holders
        yield


@contextlib.contextmanager
def fake_group(world_size, rank):
    """Creates a process group that nobody else has joined, as torchtitan does to estimate memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            without_modes(dist.DeviceMesh, "__init__"),  # FSDP2 makes meshes too; they read their numbers
            patch.multiple(dist, all_to_all_single=partial(send_something, dist.all_to_all_single)),
        ):
            yield
    finally:
        dist.destroy_process_group()


def send_something(all_to_all, output, given, received, sent, group):
    """An all-to-all of a fake group, which fails if this process sends nothing."""
    if not len(given):
        given, sent = given.new_zeros(1), [1, *sent[1:]]
    return all_to_all(output, given, received, sent, group)


def without_modes(place, name):
    """Lets a function of a module or class work on real tensors, which no dispatch mode sees, for a while."""
    function = getattr(place, name)

    def call(*args, **options):
        with _disable_current_modes():
            return function(*args, **options)

    return patch.multiple(place, **{name: call})


def gathering_in(dtype):
    """Lets FSDP2 gather weights in this dtype, as parallel.fully_shard does on CUDA alone."""
    from torch.distributed import fsdp

    def policy(param_dtype, **options):
        return original(param_dtype=dtype, **options)

    original = fsdp.MixedPrecisionPolicy
    return patch.multiple(fsdp, MixedPrecisionPolicy=policy)
