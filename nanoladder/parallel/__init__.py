"""Several processes, one per device: the process group, data parallelism, sharding. No-ops in a single process.

Each process trains on its share of the batch; gradients and losses are averaged over all processes.
"""

from nanoladder.parallel.data_parallel import DistributedDataParallel, share, synchronize_last
from nanoladder.parallel.group import (
    LaggedMax,
    all_reduce_mean,
    all_reduce_sum,
    already_printed,
    broadcast_from_first,
    check_batch,
    gather_objects,
    gather_rows,
    rank,
    require_agreement,
    start,
    stop,
    world_size,
)
from nanoladder.parallel.shards import as_shards, full_tensor, fully_shard, gather_state, local_rows, local_shard

__all__ = [
    "DistributedDataParallel",
    "LaggedMax",
    "all_reduce_mean",
    "all_reduce_sum",
    "already_printed",
    "as_shards",
    "broadcast_from_first",
    "check_batch",
    "full_tensor",
    "fully_shard",
    "gather_objects",
    "gather_rows",
    "gather_state",
    "local_rows",
    "local_shard",
    "rank",
    "require_agreement",
    "share",
    "start",
    "stop",
    "synchronize_last",
    "world_size",
]
