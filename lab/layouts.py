"""Lists the layouts: every way to divide a model and its batches among so many processes."""

import itertools
import math
from dataclasses import dataclass
from typing import get_args

from nanoladder.config import TYPES
from nanoladder.parallel import micro_batch_sizes
from nanoladder.parallel.mesh import CUTS, Grid

SCHEDULES = get_args(TYPES["pipeline_schedule"])
PLAIN = {"shard": "none", "shard_within": 0, "pipeline_schedule": SCHEDULES[0], "micro_batch_size": 0}


@dataclass(frozen=True)
class Layout:
    """A grid of processes, and the other keys of a layout, {key: value}. resumed: also continues another's run."""

    grid: Grid
    keys: dict
    resumed: bool = True

    @property
    def name(self):
        """2 data × 2 tensor, shard=full: the grid, and what else differs from its first layout."""
        chosen = {key: value for key, value in self.keys.items() if value != PLAIN[key]}
        schedule = [chosen.pop("pipeline_schedule")] if "pipeline_schedule" in chosen else []
        keys = [f"{key}={value}" for key, value in chosen.items()]
        return ", ".join([str(self.grid) or "1 process", *schedule, *keys])

    @property
    def words(self):
        """Words of train.py's command line."""
        grid = dict(zip(CUTS, (self.grid.pipeline, self.grid.context, self.grid.tensor), strict=True))
        return [f"--{key}={value}" for key, value in (grid | self.keys).items()]


def layouts(config, n):
    """Lists the Layouts of n processes: every grid of them, sharded or not, with every schedule, in micro-batches."""
    found, given = [], 0 if config.micro_batch_size == "auto" else config.micro_batch_size
    for grid in grids(n):
        base, averaging = PLAIN | {"micro_batch_size": given}, grid.data * grid.context
        found.append(Layout(grid, base))
        found += [Layout(grid, base | {"pipeline_schedule": name}) for name in SCHEDULES[1:] if grid.pipeline > 1]
        if averaging > 1:
            found.append(Layout(grid, base | {"shard": "optimizer"}, resumed=False))  # cut like the next
            found.append(Layout(grid, base | {"shard": "full"}))
        if averaging == 4:
            found.append(Layout(grid, base | {"shard": "full", "shard_within": 2}))
        sizes = [size for size in micro_batch_sizes(config, grid) if size < (given or config.batch_size // grid.data)]
        if sizes and grid.pipeline == 1:  # a pipeline has micro-batches anyway
            shards = ("none", "full") if grid.data == n > 1 else ("none",)
            keys = base | {"micro_batch_size": sizes[-1]}
            found += [Layout(grid, keys | {"shard": shard}, resumed=False) for shard in shards]
    return found


def grids(n):
    """Lists the Grids of n processes, those along one dimension first."""
    sizes = [size for size in range(1, n + 1) if n % size == 0]
    found = [Grid(*grid) for grid in itertools.product(sizes, repeat=len(Grid._fields)) if math.prod(grid) == n]
    order = ("data", "tensor", "context", "pipeline")
    return sorted(found, key=lambda grid: (sum(size > 1 for size in grid), [-getattr(grid, name) for name in order]))
