"""Layouts: configs that divide a model and its batches among so many processes, each in another way."""

import dataclasses
import itertools
import math
from typing import get_args

from nanoladder.config import TYPES
from nanoladder.parallel import divide, micro_batch_sizes
from nanoladder.parallel.mesh import CUTS, Grid

SCHEDULES = get_args(TYPES["pipeline_schedule"])
UNCUT = {"shard": "none", "shard_within": 0, "pipeline_schedule": SCHEDULES[0]}


def layouts(config, n):
    """Lists the configs of n processes: every grid of them, sharded or not, with every schedule, in micro-batches."""
    found = []
    for grid in grids(n):
        averaging, cut = grid.data * grid.context, on_grid(config, grid)
        changes = [{}]
        if grid.pipeline > 1:
            changes += [{"pipeline_schedule": name} for name in SCHEDULES[1:]]
        if averaging > 1:
            changes += [{"shard": "optimizer"}, {"shard": "full"}]
        if averaging == 4:
            changes.append({"shard": "full", "shard_within": 2})
        sizes = [size for size in micro_batch_sizes(cut, grid) if size < config.batch_size // grid.data]
        if sizes and grid.pipeline == 1:  # a pipeline has micro-batches anyway
            shards = ("none", "full") if grid.data == n > 1 else ("none",)
            changes += [{"micro_batch_size": sizes[-1], "shard": shard} for shard in shards]
        found += [dataclasses.replace(cut, **change) for change in changes]
    return found


def on_grid(config, grid):
    """The config, not sharded, for the processes of a Grid."""
    sizes = dict(zip(CUTS, (grid.pipeline, grid.context, grid.tensor), strict=True))
    return dataclasses.replace(config, **UNCUT, **sizes)


def grids(n):
    """Lists the Grids of n processes, those along one dimension first."""
    sizes = [size for size in range(1, n + 1) if n % size == 0]
    found = [Grid(*grid) for grid in itertools.product(sizes, repeat=len(Grid._fields)) if math.prod(grid) == n]
    order = ("data", "tensor", "context", "pipeline")
    return sorted(found, key=lambda grid: (sum(size > 1 for size in grid), [-getattr(grid, name) for name in order]))


def describe(config, n):
    """The layout of a config for n processes in words: 2 data × 2 tensor, shard=full."""
    grid = divide(config, n)
    words = {
        str(grid) or "1 process": True,
        f"shard={config.shard}": config.shard != "none",
        f"shard_within={config.shard_within}": config.shard_within,
        config.pipeline_schedule: grid.pipeline > 1,
        f"micro_batch_size={config.micro_batch_size}": config.micro_batch_size,
        "checkpointing": config.checkpointing != "none",
    }
    return ", ".join(word for word, applies in words.items() if applies)
