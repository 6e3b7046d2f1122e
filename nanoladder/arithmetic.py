"""Arithmetic on a config, before anything is built: weights, FLOPs, and each process's share of processes and batch."""

import dataclasses
import math
from typing import NamedTuple

from nanoladder.config import Config
from nanoladder.errors import BadInput

# -- weights and floating-point operations


def list_weights(config: Config, padded: bool = True) -> list[tuple[str, tuple[int, ...], int]]:
    """Lists the weights of a config's GPT as (name, shape, count); a tied weight once. padded: with the padding's rows.

    Weights that are alike in several layers are one entry, with * in the name for the layer's number.
    """
    C, V, n_values = config.n_embd, config.vocab_size, -(-config.n_layer // 2)
    rows = config.padded_vocab_size if padded else V
    matrices = {"attention.qkv": (3 * C, C), "attention.proj": (C, C), "mlp.fc": (4 * C, C), "mlp.proj": (C, 4 * C)}
    of_norm = {"weight": (C,), "bias": (C,)} if config.bias else {"weight": (C,)}
    block = {f"{norm}.{name}": shape for norm in ("attention_norm", "mlp_norm") for name, shape in of_norm.items()}
    block |= {f"{name}.weight": shape for name, shape in matrices.items()}
    if config.bias:
        block |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    if config.x0_skip:
        block["lambdas"] = (2,)
    others: dict = {f"norm.{name}": shape for name, shape in of_norm.items()}
    others["token_embedding.weight"] = (rows if config.tie_embeddings else V, C)
    if not config.tie_embeddings:
        others["head.weight"] = (rows, C)
    if config.position == "learned":
        others["position_embedding.weight"] = (config.context_length, C)
    if config.smear:
        others["smear"] = (C,)
    if config.value_embedding:
        others["value_lambdas"] = (n_values,)
    tables = [("value_embeddings.*.weight", (V, C), n_values)] if config.value_embedding else []
    in_blocks = [(f"blocks.*.{name}", shape, config.n_layer) for name, shape in block.items()]
    return [*in_blocks, *((name, shape, 1) for name, shape in others.items()), *tables]


def count_parameters(config: Config) -> int:
    """Number of parameters of a config's GPT, without the vocabulary's padding. A tied weight counts once."""
    return sum(count * math.prod(shape) for _, shape, count in list_weights(config, padded=False))


def count_block(config: Config) -> int:
    """Number of parameters of one block."""
    return sum(math.prod(shape) for name, shape, _ in list_weights(config) if name.startswith("blocks."))


def block_flops(config: Config) -> int:
    """Floating-point operations to train a block on one token: 6 for each of 12·C² weights, 12·C·T for attention."""
    C, T = config.n_embd, config.context_length
    return 72 * C * C + 12 * C * T


def flops_per_token(config: Config) -> int:
    """Floating-point operations to train a config's GPT on one token: 6 per multiplied weight, 12·L·C·T for attention.

    Follows Chowdhery et al. 2022 (PaLM), appendix B. The multiplied weights are the matrices of the blocks and the
    head, tied or not: no lookups, norms or biases. Ignores recomputation, the causal mask and the padding of the
    vocabulary, so every stage has the same count.
    """
    return config.n_layer * block_flops(config) + 6 * config.n_embd * config.vocab_size


# -- processes

CUTS = ("pipeline_parallel", "context_parallel", "tensor_parallel")  # keys of the dimensions; data is what they leave


class Grid(NamedTuple):
    """Processes along each dimension of the mesh, or the place of one process in it."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1

    def __str__(self):
        """2 data × 4 tensor: every dimension of more than one process."""
        names = ("data", "pipeline", "context", "tensor")
        return " × ".join(f"{getattr(self, name)} {name}" for name in names if getattr(self, name) > 1)


def divide(config: Config, n: int) -> Grid:
    """Returns the Grid of n processes: the other dimensions determine data. Raises BadInput if they do not divide n."""
    pipeline, context, tensor = config.pipeline_parallel, config.context_parallel, config.tensor_parallel
    product = pipeline * context * tensor
    if n == 1:
        return Grid()  # one process has every part
    if n % product:
        keys = " × ".join(f"{key}={getattr(config, key)}" for key in CUTS if getattr(config, key) > 1)
        raise BadInput(f"{keys} does not divide {n} processes; expected a multiple of {product} (--nproc_per_node)")
    return Grid(pipeline, n // product, context, tensor)


def count_sharing(config: Config, sizes: Grid, n_per_node: int) -> int:
    """Number of processes that hold one copy of their weights among them: a Mesh's n_sharing."""
    averaging = sizes.data * sizes.context
    if config.shard == "none":
        return 1
    if config.shard == "hybrid":
        return math.gcd(max(1, n_per_node // sizes.tensor), averaging)
    return averaging


# -- a process's share of the batch, and its micro-batches

STAGES = {"1f1b": 1, "interleaved": 2}  # stages of a process in each schedule of a pipeline


def share_of_process(config: Config, world_size: int) -> Config:
    """Returns the config with the batch_size and micro_batch_size of one of world_size processes."""
    grid = divide(config, world_size)
    size = micro_batch_size(config, grid)
    return dataclasses.replace(config, batch_size=config.batch_size // grid.data, micro_batch_size=size)


def count_tokens(config: Config, world_size: int) -> int:
    """Number of tokens in a forward of one of world_size processes: of its micro-batch, its part of each sequence."""
    parts = divide(config, world_size).context
    return share_of_process(config, world_size).micro_batch_size * config.context_length // parts


def micro_batch_size(config: Config, grid: Grid) -> int:
    """Sequences in a micro-batch of a process's share of the batch. micro_batch_size=0: as many as possible."""
    share = config.batch_size // grid.data
    return min(config.micro_batch_size or max(micro_batch_sizes(config, grid), default=share), share)  # pyright: ignore


def micro_batch_sizes(config: Config, grid: Grid) -> list[int]:
    """Sizes into which a process's share of the batch divides, ascending; in a pipeline only sizes that fill it."""
    share = config.batch_size // grid.data
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    return [size for size in divisors if can_schedule(config.pipeline_schedule, grid.pipeline, share // size)]


def can_schedule(schedule: str, n_processes: int, n_micro_batches: int) -> bool:
    """True if a schedule can run with this number of micro-batches."""
    if schedule == "1f1b":
        return n_micro_batches >= n_processes
    return n_micro_batches % n_processes == 0


def predict_bubble(schedule: str, n_processes: int, n_micro_batches: int) -> float:
    """Share of a step in which a process waits, if all stages take equally long and sending takes no time.

    p - 1 of the m + p - 1 turns for 1f1b, of v·m + p - 1 with v stages a process (Narayanan et al. 2021, section 2.2).
    """
    return (n_processes - 1) / (STAGES[schedule] * n_micro_batches + n_processes - 1)
