"""Layouts: configs that divide a model and its batches among n processes, each in a different way."""

import dataclasses
import itertools
import math
from typing import get_args

from nanoladder.config import TYPES
from nanoladder.parallel import divide
from nanoladder.parallel.mesh import CUTS, Grid

SCHEDULES = get_args(TYPES["pipeline_schedule"])
UNCUT = {"shard": "none", "shard_within": 0, "pipeline_schedule": SCHEDULES[0]}


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
        "checkpointing": config.activation_checkpointing != "none",
    }
    return ", ".join(word for word, applies in words.items() if applies)
