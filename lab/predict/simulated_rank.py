"""Simulates one process of many, without the others: code that cuts a model runs, but its messages hold no numbers."""

import contextlib

import torch

from lab.predict import patches
from nanoladder.arithmetic import Grid, count_sharing, divide
from nanoladder.parallel.mesh import mesh, set_mesh

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
            stack.enter_context(patches.fake_group(world_size, rank))
            if device_type == "cuda" and config.dtype != "float32":
                stack.enter_context(patches.gathering_in(getattr(torch, config.dtype)))
        set_mesh(sizes, rank, n_sharing, "cpu")
        stack.callback(set_mesh, Grid(), 0, 1, "cpu")
        if world_size > 1:  # before there are fake tensors, from which a mesh cannot be made
            _ = mesh().weights, mesh().context, mesh().holders
        yield
