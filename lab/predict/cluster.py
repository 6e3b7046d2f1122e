"""Plans runs on many GPUs: predicts the memory and the time of a step in every layout, and ranks the layouts that fit.

python -m lab.predict.cluster config/x.py --gpus=64 [--memory_gb=80] [--key=value ...]

A GPU computes at a constant rate, and a group's traffic moves at the rate of its slowest link. Weights and gradients
move while the processes compute; for activations, the processes wait.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple, get_args

from lab.measure.cli import at_least, positive
from lab.measure.tables import plain, texts
from nanoladder.arithmetic import (
    CUTS,
    STAGES,
    Grid,
    block_flops,
    can_schedule,
    count_block,
    count_parameters,
    count_sharing,
    count_tokens,
    divide,
    flops_per_token,
    predict_bubble,
)
from nanoladder.config import TYPES
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput
from nanoladder.machine.device import PEAK_TFLOPS
from nanoladder.run import load_config

PEAK = PEAK_TFLOPS["H100"] * 1e12  # FLOP/s in bfloat16
RATE = 0.41 * PEAK  # while it computes: Megatron-Core's 1.7B, which is not cut (docs/parallelism.md)
HBM = 3.35e12  # bytes/s of a GPU's memory (H100's datasheet)
NODE = 8  # GPUs
NVLINK = 0.75 * 450e9  # bytes/s that a GPU sends within a node: three quarters of the datasheet's
ADAPTER = 0.75 * 400e9 / 8  # bytes/s that a GPU sends through its own adapter to another node
HOP = 5e-6  # seconds for each hop of a ring
STAGING = 25e9  # bytes/s from a GPU to pinned host memory: half of what sixteen lanes of PCIe 5 reach
FREE = 0.1  # share of a GPU's memory
CLOSE = 1.05  # a simpler layout wins if it takes at most this much longer
SCHEDULES = get_args(TYPES["pipeline_schedule"])
WEIGHTS = "full", "hybrid"  # values of shard that shard the weights, too


# -- a step


class Sizes(NamedTuple):
    """Numbers of parameters of a GPT, in total and per block. flops: per token, without recomputation."""

    n_params: int
    block: int
    flops: int


def sizes_of(config):
    """Returns the Sizes of a config's model."""
    return Sizes(count_parameters(config), count_block(config), flops_per_token(config))


class Step(NamedTuple):
    """A step of one process: seconds of each part and in all, bubble (a share of one), bytes of memory.

    tensor, context, pipeline: each dimension's traffic, none of it hidden. data: the traffic of weights and gradients;
    exposed: the part of it that is not hidden. saved: bytes of a checkpoint that the process writes, in the background,
    once a copy of them is in host memory: training stops for saved / STAGING seconds. A signal travels with the loss.
    """

    n_micro: int
    compute: float
    tensor: float
    context: float
    pipeline: float
    data: float
    exposed: float
    bubble: float
    memory: float
    saved: float
    seconds: float


def predict_step(config, sizes, n_gpus):
    """Returns the Step of a config, which has a micro_batch_size, on n_gpus GPUs."""
    p, d, c, t = grid = divide(config, n_gpus)
    n, s = d * c, count_sharing(config, grid, NODE)
    recompute, v = config.activation_checkpointing != "none", STAGES[config.pipeline_schedule]
    n_micro = config.batch_size // d // config.micro_batch_size
    tokens = count_tokens(config, n_gpus)  # in all processes of a tensor group together
    width = tokens * config.n_embd
    layers, weights = config.n_layer / p, sizes.n_params / (t * p)  # of a process

    # Of each micro-batch: the compute, no faster than weights are read; then what cannot hide behind it
    passes = 3 if recompute else 2
    again = config.n_layer * block_flops(config) / 3 if recompute else 0  # a block's forward is a third of its work
    compute = max(tokens * (sizes.flops + again) / (t * p) / RATE, (passes + 1) * 2 * weights / HBM)
    # bytes per number: 2 before and 2 after a sublayer, and backward; the last is not recomputed; embedding and head
    sums = layers * (16 + 6 * recompute) + 12 / p
    tensor = sums * width * (t - 1) / t / ring(t, 1) + layers * passes * 4 * (t - 1) * HOP
    swaps = layers * passes * 4 * 2 * width / t * (c - 1) / c  # q, k, v and the output, 2 bytes each
    context = swaps / (NVLINK if c * t <= NODE else ADAPTER) + layers * passes * 2 * (c - 1) * HOP
    sends = 2 * v * (p > 1)
    pipeline = sends * (stream_bytes(config) * width / t / (NVLINK if n * t * p <= NODE else ADAPTER) + HOP)

    # Of the step: weights and gradients, behind the compute of all micro-batches or of one; then the update
    regathers = config.shard in WEIGHTS and p == 1
    gathers, reductions = (2 * n_micro, n_micro) if regathers else (int(config.shard != "none"), 1)
    # Gathered in half precision, but outside the blocks in float32: there full gathers once, not twice
    in_float32 = 0 if regathers else outside(config, sizes) / (t * p)
    data = (2 * gathers * (weights + in_float32) + 4 * reductions * weights) * (s - 1) / s / ring(s, t)
    data += (gathers + reductions) * layers * (s - 1) * HOP
    copies = n // s
    data += 8 * weights / s * (copies - 1) / copies / ring(copies, t * s)
    exposed = max(0.0, data - compute * (n_micro if regathers else 1))
    update = 28 * weights / s / HBM  # reads weight, gradient and two moments, writes all but the gradient

    bubble = predict_bubble(config.pipeline_schedule, p, n_micro)
    seconds = n_micro * (compute + tensor + context + pipeline) / (1 - bubble) + exposed + update
    parts = [n_micro * part for part in (compute, tensor, context, pipeline)]
    memory = predict_bytes(config, sizes, grid, s, n_micro, width)
    saved = 12 * weights / s  # weights and two moments
    return Step(n_micro, *parts, data=data, exposed=exposed, bubble=bubble, memory=memory, saved=saved, seconds=seconds)


def ring(n, stride):
    """Bytes/s that each of n processes sends in a ring, their ranks `stride` apart.

    A ring leaves a node through the adapters of all its members there.
    """
    on_node = min(n, max(1, NODE // stride))
    return NVLINK if on_node == n else min(NVLINK, on_node * ADAPTER)


def stream_bytes(config):
    """Bytes of a number of the residual stream."""
    return 2 if config.half_residual else 4


def outside(config, sizes):
    """Number of parameters outside the blocks: embeddings, head and last norm."""
    return sizes.n_params - config.n_layer * sizes.block


def predict_bytes(config, sizes, grid, s, n_micro, width):
    """Returns the bytes of a process's tensors, of which s processes share a copy.

    width: numbers in the activations between blocks, of a tensor group.
    """
    p, _, _, t = grid
    layers, weights, recompute = config.n_layer / p, sizes.n_params / (t * p), config.activation_checkpointing != "none"
    regathers = config.shard in WEIGHTS and p == 1
    others = outside(config, sizes) / (t * p)
    in_half = 2 * sizes.block / t + others if regathers else weights
    gathered = 8 * others if s > 1 else 0  # in float32, and their gradient before it is reduced
    # Whole float32 gradients until the last micro-batch, unless each one's are reduced
    waiting = 4 * weights if s > 1 and n_micro > 1 and not regathers else 0
    stream = stream_bytes(config) * width / t
    block = 2 * stream + 14 * 2 * width / t  # the norms' inputs, and what products and attention keep
    kept = stream if recompute else block  # a block's input
    in_flight = min(n_micro, p * (1 + STAGES[config.pipeline_schedule]) / 2)  # micro-batches, on the first stage
    return 16 * weights / s + 2 * in_half + gathered + waiting + layers * in_flight * kept + recompute * block


# -- the fastest layout


def layouts(config, n_gpus):
    """Yields the config in every layout that divides it among n_gpus GPUs, tensor groups within a node.

    float8 has no tensor groups; its times are those of bfloat16.
    """
    sizes = [size for size in range(1, n_gpus + 1) if n_gpus % size == 0]
    for grid in itertools.starmap(Grid, itertools.product(sizes, repeat=len(Grid._fields))):
        p, d, c, t = grid
        if math.prod(grid) != n_gpus or config.batch_size % d or t > (1 if config.float8 else NODE):
            continue
        if config.n_head % (c * t) or config.context_length % (c * t):
            continue
        rows, within = config.batch_size // d, count_sharing(dataclasses.replace(config, shard="hybrid"), grid, NODE)
        shards = ["none"]
        if d * c > 1:
            shards += ["optimizer", "full"] if p == 1 else ["optimizer"]  # in a pipeline, full gathers no more often
        if 1 < within < d * c:
            shards.append("hybrid")
        micro = [size for size in (1, 2, 4, 8, 16) if rows % size == 0]
        cuts = dict(zip(CUTS, (p, c, t), strict=True))
        for shard, size, recomputed, schedule in itertools.product(
            shards, micro, ("none", "every:1"), SCHEDULES[: 1 + (p > 1)]
        ):
            if p == 1 or (p * STAGES[schedule] <= config.n_layer and can_schedule(schedule, p, rows // size)):
                keys = {"shard": shard, "micro_batch_size": size, "pipeline_schedule": schedule}
                yield dataclasses.replace(config, **cuts, **keys, activation_checkpointing=recomputed)


def fastest(config, sizes, n_gpus, memory_gb=80):
    """Returns [(layout, Step)] of all layouts that fit, fastest first, but layouts CLOSE to it go by simplicity.

    A layout is simpler without a pipeline, then without tensor or context parallelism, recomputing or sharding, and
    then with larger micro-batches.
    """
    candidates = [(layout, predict_step(layout, sizes, n_gpus)) for layout in layouts(config, n_gpus)]
    fitting = [pair for pair in candidates if pair[1].memory <= (1 - FREE) * memory_gb * 1e9]
    least = min((step.seconds for _, step in fitting), default=0.0)

    def order(pair):
        layout, step = pair
        if step.seconds > CLOSE * least:
            return 1, step.seconds
        cuts = layout.pipeline_parallel > 1, layout.tensor_parallel > 1, layout.context_parallel > 1
        complications = (
            *cuts,
            layout.activation_checkpointing != "none",
            layout.shard == "hybrid",
            layout.shard != "none",
        )
        return 0, complications, -layout.micro_batch_size, step.seconds

    return sorted(fitting, key=order)


# -- the command


def in_words(layout, n_gpus):
    """Describes a layout: 2 data × 2 tensor, shard=full."""
    grid = divide(layout, n_gpus)
    words = {
        str(grid) or "1 process": True,
        f"shard={layout.shard}": layout.shard != "none",
        layout.pipeline_schedule: grid.pipeline > 1,
        "checkpointing": layout.activation_checkpointing != "none",
    }
    return ", ".join(word for word, applies in words.items() if applies)


def row(layout, step, n_gpus, flops):
    """A row of the table: {heading: text}. flops: of a token."""
    tokens = layout.batch_size * layout.context_length / n_gpus / step.seconds
    ms = {key: f"{1e3 * getattr(step, key):,.0f}" for key in ("compute", "tensor", "context", "pipeline", "data")}
    return {
        "layout": in_words(layout, n_gpus),
        "micro-batches": f"{step.n_micro} × {layout.micro_batch_size}",
        "GB": f"{step.memory / 1e9:.0f}",
        **{f"{key} ms": text for key, text in ms.items()},
        "not hidden": f"{1e3 * step.exposed:,.0f}",
        "bubble": f"{step.bubble:.0%}",
        "step ms": f"{1e3 * step.seconds:,.0f}",
        "save GB": f"{step.saved / 1e9:.1f}",
        "save ms": f"{1e3 * step.saved / STAGING:,.0f}",
        "tokens/s a GPU": f"{tokens:,.0f}",
        "MFU": f"{tokens * flops / PEAK:.0%}",
    }


def main(argv):
    usage = "python -m lab.predict.cluster config/x.py [--gpus=8] [--memory_gb=80] [--key=value]"
    parser = Parser(prog="python -m lab.predict.cluster", usage=usage, allow_abbrev=False)
    parser.add_argument("--gpus", type=at_least(1), default=8, help="processes, eight to a node (default: %(default)s)")
    parser.add_argument(
        "--memory_gb", type=positive, default=80, help="memory of a GPU, in 1e9 bytes (default: %(default)s)"
    )
    options, words = parser.parse_known_args(argv)
    config = load_config(words, vars(options))
    if not config.vocab_size:
        raise BadInput("vocab_size=0: the time of a step depends on it; expected a number, such as --vocab_size=50257")
    sizes = sizes_of(config)
    plans = fastest(config, sizes, options.gpus, options.memory_gb)
    if not plans:
        raise BadInput(
            f"--gpus={options.gpus}: no layout of batch_size={config.batch_size} fits {options.memory_gb:g} GB; "
            "expected more memory, more GPUs or, if they outnumber the sequences, a larger batch"
        )
    rows = {str(i): row(*pair, options.gpus, sizes.flops) for i, pair in enumerate(plans[:10], 1)}
    for number, each in rows.items():
        print(f"{number:>2}  {each.pop('layout')}")
    headings = next(iter(rows.values()))
    print("\n" + texts({heading: {i: each[heading] for i, each in rows.items()} for heading in headings}, plain))
    print(f"\nOf layouts within {CLOSE - 1:.0%} of the fastest, the simplest comes first.")


if __name__ == "__main__":
    run_script(main)
