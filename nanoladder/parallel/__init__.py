"""Several processes, one for each device: the process group, the wrapping of the model, and what they share.

`torchrun` starts the processes and tells each its place in environment variables. Every process holds a share of
the batch; gradients and losses are averaged over all. Alone, nothing here does anything.
"""

import dataclasses
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from nanoladder.errors import BadInput
from nanoladder.machine import choose_dtype, eight_bit_library


def world_size():
    """The number of processes; 1 where there is no group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def start(config, device):
    """Joins the processes that torchrun started, if there are several. Returns this one's device.

    Raises BadInput if the batch or the devices do not divide among them.
    """
    n, local_rank, local_n = (
        int(os.environ.get(name, default))
        for name, default in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if n == 1:
        return device
    check_batch(config, n)
    if config.optimizer_in_backward:
        raise BadInput(
            f"optimizer_in_backward uses a gradient before it is averaged over the {n} processes; "
            "expected --optimizer_in_backward=False, or one process"
        )
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if local_n > n_devices or config.device.startswith("cuda:"):
            raise BadInput(
                f"device={config.device} with {local_n} processes on a machine with {n_devices} CUDA devices; "
                f"expected --device=auto or cuda, and at most --nproc_per_node={n_devices}"
            )
        device = torch.device("cuda", local_rank)
    elif local_n > 1 and os.environ.get("OMP_NUM_THREADS") == "1":  # what torchrun sets where the user does not
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, n_cores // local_n))
    if not dist.is_initialized():
        store, number, _ = next(dist.rendezvous("env://"))
        if local_n == n:  # torchrun keeps a node's store over restarts, with the addresses of processes long gone
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=number, world_size=n, device_id=device_id)
    if rank() > 0:  # only the first process prints
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return device


def check_batch(config, n):
    """Raises BadInput unless each of n processes gets as much of a batch, in whole micro-batches."""

    if config.micro_batch_size == "auto":
        config = dataclasses.replace(config, micro_batch_size=1)  # what is chosen will divide

    def divides(batch_size):
        share, left_over = divmod(batch_size, n)
        micro = min(config.micro_batch_size or share, share)
        return share > 0 and not left_over and share % micro == 0 and batch_size % (config.micro_batch_size or 1) == 0

    if not divides(config.batch_size):
        step = n * (config.micro_batch_size or 1)
        sizes = range(max(0, config.batch_size - step), config.batch_size + step + 1)
        less = [size for size in sizes if size < config.batch_size and divides(size)]
        more = [size for size in sizes if size > config.batch_size and divides(size)]
        micro = f" in micro-batches of {config.micro_batch_size}" if config.micro_batch_size else ""
        raise BadInput(
            f"batch_size={config.batch_size} does not divide among {n} processes{micro}; "
            f"expected batch_size {' or '.join(map(str, less[-1:] + more[:1]))}, or another number of processes"
        )


def stop():
    """Leaves the group, when every process has come to the end."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def said_before(line):
    """Whether another process has said this line, as counted in the store where torchrun's processes meet."""
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=10)))
        return store.add(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}: {line}", 1) > 1
    except (dist.DistError, ValueError):  # there is none
        return False


def choices(config):
    """What the header says of the processes."""
    n = world_size()
    if n == 1:
        return {} if config.shard == "none" else {"shard": "nothing: there is one process"}
    what = {"none": "each with all of the model's state", "optimizer": "each with its share of optimizer and gradients"}
    what |= {"full": "each with its share of weights, gradients and optimizer"}
    return {"processes": f"{n} by {dist.get_backend()}, {what[config.shard]}"}


def agree(facts, what):
    """Raises BadInput, on every process, where one has other facts, {name: value}, than the first."""
    if world_size() == 1:
        return
    everyone = [None] * world_size()
    dist.all_gather_object(everyone, facts)
    for number, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise BadInput(
                    f"the processes differ in their {what}: rank {number} has {name}={theirs[name]}, "
                    f"rank 0 {name}={value}; expected the same on every machine"
                )


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """DDP (Li et al. 2020) that answers for the model it wraps: its attributes, methods and names of the weights."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.broadcast_buffers = False  # they are constants

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)


def fully_shard(model, config, device):
    """Shards the model in place (FSDP2, Zhao et al. 2023): each process keeps its part of every tensor.

    A block is gathered before its turn and reduced after its backward; what is left is the root's, whole until the
    backward is over: the token embedding with the head, so that they stay tied, positions and last norm.
    """
    from torch.distributed import fsdp  # a second to import, which only this needs

    if config.optimizer == "adamw8bit":
        check_8_bits(model, config, device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world_size(),))
    dtype = choose_dtype(config.dtype, device)
    # On a GPU a block travels in the dtype that autocast multiplies in; a CPU's norms take no half weights.
    half = dtype if device.type == "cuda" and dtype != torch.float32 else None
    policy = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.shard == "full")
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)


def check_8_bits(model, config, device):
    """Raises BadInput where the state of 8-bit AdamW cannot be sharded."""
    uneven = [f"{name} has {len(p)}" for name, p in model.named_parameters() if len(p) % world_size()]
    if uneven:
        raise BadInput(
            f"optimizer=adamw8bit with shard={config.shard} needs as many rows of a tensor in each of {world_size()} "
            f"processes, and {uneven[0]}; expected --pad_vocab_to, --context_length and --n_embd to be multiples of "
            f"{world_size()}, or --shard=none"
        )
    if eight_bit_library(device) == "bitsandbytes":
        raise BadInput(f"optimizer=adamw8bit with shard={config.shard} needs torchao; install it, or use --shard=none")


def synchronize_last(model, micro_batches):
    """Yields the micro-batches; only in the last one's backward are the gradients averaged over the processes."""
    *others, last = micro_batches
    synchronize(model, False)
    yield from others
    synchronize(model, True)
    yield last


def synchronize(model, on):
    """Says, before a forward, whether its backward averages the gradients over the processes."""
    if world_size() == 1:
        return
    if model.config.shard == "none":
        model.require_backward_grad_sync = on
    else:
        model.set_requires_gradient_sync(on)
        model.set_reshard_after_backward(on or model.config.shard == "full")


def gathered(tensor):
    """The whole of a tensor, should it be sharded; for all processes to call."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def from_first(make):
    """What make() returns in the first process, for all of them; for all to call."""
    values = [make() if rank() == 0 else None]
    if world_size() > 1:  # over gloo, whose patience can be set, as trials may take long
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        dist.broadcast_object_list(values, group=group)
    return values[0]


class Agreed:
    """The largest of each number over the processes, of those given a call ago: it travels while a step runs.

    Alone, of those given.
    """

    def __init__(self):
        several_gpus = world_size() > 1 and dist.get_backend() == "nccl"
        self.group = dist.new_group(backend="gloo") if several_gpus else None  # the numbers stay on the hosts
        self.travelling = None

    def __call__(self, *numbers):
        if world_size() == 1:
            return numbers
        arrived, tensor = self.travelling, torch.tensor(numbers)
        self.travelling = tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
        if arrived is None:
            return (0,) * len(numbers)
        arrived[1].wait()
        return arrived[0].tolist()


def mean(tensor):
    """The mean of a tensor over the processes, on its device: no one waits for the host."""
    return total(tensor) / world_size() if world_size() > 1 else tensor


def total(tensor):
    """The sum of a tensor over the processes, on its device."""
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def whole(state):
    """A copy of a state dict on the CPU of the first process, sharded tensors gathered; for all of them to call."""
    copies = {}  # one of a tensor that is there twice

    def copy(tensor):
        if id(tensor) not in copies:
            everything = gathered(tensor.detach())  # one at a time in the memory of the device
            copies[id(tensor)] = everything.to("cpu", copy=True) if rank() == 0 else None
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, state)


def part(tensor, like):
    """This process's shard of a whole tensor where `like` is sharded and of the same shape, else the tensor."""
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def own_rows(tensor, like):
    """This process's rows of a whole tensor where `like` is sharded into as many rows for each, else the tensor."""
    return tensor.chunk(world_size())[rank()].clone() if hasattr(like, "placements") else tensor


def shards(tensors, like):
    """Tensors that each process has as many rows of, as shards of whole ones where `like` is sharded."""
    if not hasattr(like, "placements"):
        return tensors
    from torch.distributed.tensor import DTensor

    return [DTensor.from_local(tensor, like.device_mesh, like.placements) for tensor in tensors]


def rows(tensor):
    """The tensor (n,) of every process: (world_size, n), on the CPU."""
    everyone = [tensor]
    if world_size() > 1:
        everyone = [None] * world_size()
        dist.all_gather_object(everyone, tensor)
    return torch.stack(everyone)
