"""Several processes, one per device: the process group, and every way to divide the work. No-ops in a single process.

- group: joining and leaving, agreement, collectives
- flag: what one process tells all in every step
- heartbeat: where each process is, and an end if one falls silent
- mesh: each process's place, and the parts that follow from it
- data_parallel: a share of each batch; DDP
- meta: building a model that no process holds whole
- shards: a shard of every weight, gradient and optimizer state; FSDP2
- tensor, context, pipeline: a part of every matrix, of every sequence, of the blocks
- distributed_muon: work on whole matrices, each in one of the processes that hold its shards
- division: which part of a whole tensor each process holds
- full_state: whole tensors from each process's parts, and back; clipping by the global norm
- reports: from every process to the first, while they train
- checks: refusals of what a config cannot do in several processes

Gradients are averaged over the processes that train on different tokens, losses over all.
"""

from nanoladder.parallel.checks import LAUNCHED, check_grid, n_launched
from nanoladder.parallel.context import apply_context_parallel
from nanoladder.parallel.data_parallel import DistributedDataParallel, share, synchronize_last
from nanoladder.parallel.distributed_muon import in_all_holders, map_matrices
from nanoladder.parallel.division import Division, Sizes, box_name, boxes, sizes
from nanoladder.parallel.flag import LaggedFlag
from nanoladder.parallel.full_state import (
    WholeTensors,
    as_shards,
    clip_grad_norm_,
    copy_part,
    full_tensor,
    local_rows,
    local_shard,
    merge_stages,
)
from nanoladder.parallel.group import (
    add,
    all_reduce_mean,
    already_printed,
    destroy_process_group,
    gather_objects,
    init_process_group,
    limit_collectives,
    rank,
    require_agreement,
    world_size,
)
from nanoladder.parallel.heartbeat import explain_lost_peer, heard, tell, watch_signals
from nanoladder.parallel.mesh import local, mesh
from nanoladder.parallel.meta import build, init_shards
from nanoladder.parallel.pipeline import COPY, TIED, apply_pipeline_parallel
from nanoladder.parallel.reports import Reports, holder
from nanoladder.parallel.shards import fully_shard
from nanoladder.parallel.tensor import apply_tensor_parallel
