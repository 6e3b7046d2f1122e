"""Plans runs on many GPUs, on paper: the memory and the time of a step in any layout, and the fastest that fit.

python -m lab.cluster                                      # the plans of docs/parallelism.md
python -m lab.cluster config/x.py --gpus=64 [--key=value]  # the fastest layouts of this config

A GPU computes at a constant rate, and a group's traffic moves at the rate of its slowest link. Weights and gradients
move while the processes compute; they wait for activations.
"""

import itertools
import math
from dataclasses import dataclass
from nanoladder.entry import Parser, run_script

from lab.tables import texts
from nanoladder.errors import BadInput
from nanoladder.machine.device import PEAK_TFLOPS
from nanoladder.parallel.mesh import Grid
from nanoladder.parallel.pipeline import STAGES, can_schedule, predict_bubble
from nanoladder.run import load_config

PEAK = PEAK_TFLOPS["H100"] * 1e12  # FLOP/s in bfloat16
RATE = 0.41 * PEAK  # while it computes: Megatron-Core's 1.7B, which is not cut (docs/parallelism.md)
HBM = 3.35e12  # bytes/s of a GPU's memory (H100's datasheet)
NODE = 8  # GPUs
NVLINK = 0.75 * 450e9  # bytes/s that a GPU sends within a node: three quarters of the datasheet's
ADAPTER = 0.75 * 400e9 / 8  # bytes/s that a GPU sends through its own adapter to another node
HOP = 5e-6  # seconds for each hop of a ring
ACTIVATIONS = 2 * 4 + 14 * 2  # bytes that a block keeps, per number of its width: the norms' inputs are float32
FREE = 0.1  # share of a GPU's memory
CLOSE = 1.05  # a simpler layout wins if it takes at most this much longer


# -- a step


@dataclass(frozen=True)
class Model:
    """Sizes of a GPT. block, outside: parameters of a block, of all else. head: those of the output head."""

    n_layer: int
    n_embd: int
    n_head: int
    context_length: int
    block: int
    outside: int
    head: int

    @property
    def n_params(self):
        return self.n_layer * self.block + self.outside

    def flops(self, recompute=False):
        """Floating-point operations for each token (as metrics.flops_per_token), or with all blocks recomputed."""
        blocks = self.n_layer * (6 * self.block + 12 * self.n_embd * self.context_length)
        return blocks * (4 / 3 if recompute else 1) + 6 * self.head


def gpt(n_layer, n_embd, n_head, context_length, n_vocab=50304):
    """Returns the Model of model.py without biases."""
    block, head = 12 * n_embd**2 + 2 * n_embd, (n_vocab + 1) * n_embd  # with the last norm
    return Model(n_layer, n_embd, n_head, context_length, block, head + context_length * n_embd, head)


@dataclass(frozen=True)
class Layout:
    """A grid of processes, of which n_sharing hold one copy of their weights. rows: sequences of a micro-batch."""

    grid: Grid
    shard: str
    n_sharing: int
    rows: int
    recompute: bool
    schedule: str = "1f1b"

    def __str__(self):
        within = 1 < self.n_sharing < self.grid.data * self.grid.context
        words = {
            str(self.grid): True,
            f"shard={self.shard}": self.shard != "none",
            f"shard_within={self.n_sharing}": within,
            self.schedule: self.grid.pipeline > 1,
            "checkpointing": self.recompute,
        }
        return ", ".join(word for word, applies in words.items() if applies)


@dataclass(frozen=True)
class Step:
    """A step of one process: seconds of each part and in all, bubble (a share of one), bytes of memory.

    tensor, context, pipeline: what each dimension sends, none of it hidden. data: what weights and gradients take;
    exposed: the part of it that does not hide.
    """

    n_micro: int
    compute: float
    tensor: float
    context: float
    pipeline: float
    data: float
    exposed: float
    update: float
    bubble: float
    memory: float
    seconds: float


def predict_step(model, layout, batch_size, rate=RATE):
    """Returns the Step of a batch of so many sequences in all. rate: FLOP/s of a computing GPU."""
    p, d, c, t = layout.grid
    n, s = d * c, layout.n_sharing
    n_micro = batch_size // d // layout.rows
    tokens = layout.rows * model.context_length // c  # of a micro-batch, in all processes of a tensor group together
    width = tokens * model.n_embd
    layers, weights = model.n_layer / p, model.n_params / (t * p)  # of a process

    # Of each micro-batch: the compute, no faster than weights are read; then what cannot hide behind it
    passes = 3 if layout.recompute else 2
    compute = max(tokens * model.flops(layout.recompute) / (t * p) / rate, (passes + 1) * 2 * weights / HBM)
    # bytes per number: 2 before and 2 after a sublayer, and backward; the last is not recomputed; embedding and head
    sums = layers * (16 + 6 * layout.recompute) + 12 / p
    tensor = sums * width * (t - 1) / t / ring(t, 1) + layers * passes * 4 * (t - 1) * HOP
    swaps = layers * passes * 4 * 2 * width / t * (c - 1) / c  # q, k, v and the output, 2 bytes each
    context = swaps / (NVLINK if c * t <= NODE else ADAPTER) + layers * passes * 2 * (c - 1) * HOP
    sends = 2 * STAGES[layout.schedule] * (p > 1)
    pipeline = sends * (4 * width / t / (NVLINK if n * t * p <= NODE else ADAPTER) + HOP)

    # Of the step: weights and gradients, behind the compute of all micro-batches or of one; then the update
    regathers = layout.shard == "full" and p == 1
    gathers = {"none": 0, "optimizer": 1, "full": 2 * n_micro if regathers else 1}[layout.shard]
    data = (2 * gathers + 4) * weights * (s - 1) / s / ring(s, t) + (gathers + 1) * layers * (s - 1) * HOP
    copies = n // s
    data += 8 * weights / s * (copies - 1) / copies / ring(copies, t * s)
    exposed = max(0.0, data - compute * (n_micro if regathers else 1))
    update = 28 * weights / s / HBM  # reads weight, gradient and two moments, writes all but the gradient

    bubble = predict_bubble(layout.schedule, p, n_micro)
    seconds = n_micro * (compute + tensor + context + pipeline) / (1 - bubble) + exposed + update
    parts = [n_micro * part for part in (compute, tensor, context, pipeline)]
    memory = predict_bytes(model, layout, n_micro, width)
    return Step(n_micro, *parts, data, exposed, update, bubble, memory, seconds)


def ring(n, stride):
    """Bytes/s that each of n processes sends in a ring, their ranks `stride` apart.

    A ring leaves a node through the adapters of all its members there.
    """
    on_node = min(n, max(1, NODE // stride))
    return NVLINK if on_node == n else min(NVLINK, on_node * ADAPTER)


def predict_bytes(model, layout, n_micro, width):
    """Returns the bytes of a process's tensors. width: numbers in the activations between blocks, of a tensor group."""
    p, _, _, t = layout.grid
    s, layers, weights = layout.n_sharing, model.n_layer / p, model.n_params / (t * p)
    in_half = (2 * model.block + model.outside) / t if layout.shard == "full" and p == 1 else weights
    waiting = 4 * weights if s > 1 and n_micro > 1 else 0  # whole float32 gradients, until the last micro-batch
    block = ACTIVATIONS * width / t
    kept = 4 * width / t if layout.recompute else block  # a block's float32 input
    in_flight = min(n_micro, p * (1 + STAGES[layout.schedule]) / 2)  # micro-batches, on the first stage
    return 16 * weights / s + 2 * in_half + waiting + layers * in_flight * kept + layout.recompute * block


# -- the fastest layout


def layouts(model, n_gpus, batch_size):
    """Yields every Layout of so many GPUs that divides the model and the batch, tensor groups within a node."""
    sizes = [2**i for i in range(n_gpus.bit_length()) if n_gpus % 2**i == 0]
    for p, c, t in itertools.product(sizes, repeat=3):
        d, left = divmod(n_gpus, p * c * t)
        if left or batch_size % d or t > NODE or model.n_head % (c * t) or model.context_length % (c * t):
            continue
        rows, groups = batch_size // d, {math.gcd(NODE // t, d * c), d * c} - {1}
        shards = [("none", 1), *itertools.product(("optimizer", "full")[: 1 + (p == 1)], groups)]
        micro = [size for size in (1, 2, 4, 8, 16) if rows % size == 0]
        for (shard, s), size, recompute, schedule in itertools.product(
            shards, micro, (False, True), ("1f1b", "interleaved")[: 1 + (p > 1)]
        ):
            if p == 1 or (p * STAGES[schedule] <= model.n_layer and can_schedule(schedule, p, rows // size)):
                yield Layout(Grid(p, d, c, t), shard, s, size, recompute, schedule)


def fastest(model, n_gpus, batch_size, memory_gb=80):
    """Returns [(Layout, Step)] of all that fit, the fastest first, but before it a simpler one if that is as CLOSE.

    Simpler is one without a pipeline, then without tensor or context parallelism, recomputing or sharding, and then one
    with larger micro-batches.
    """
    found = [(layout, predict_step(model, layout, batch_size)) for layout in layouts(model, n_gpus, batch_size)]
    fitting = [pair for pair in found if pair[1].memory <= (1 - FREE) * memory_gb * 1e9]
    least = min((step.seconds for _, step in fitting), default=0.0)

    def order(pair):
        layout, step = pair
        p, d, c, t = layout.grid
        if step.seconds > CLOSE * least:
            return 1, step.seconds
        complications = p > 1, t > 1, c > 1, layout.recompute, 1 < layout.n_sharing < d * c, layout.shard != "none"
        return 0, complications, -layout.rows, step.seconds

    return sorted(fitting, key=order)


# -- the plans


PLANS = {  # name: Model, tokens of a step in millions
    "1.5B": (gpt(48, 1600, 25, 1024), 1),
    "6.7B": (gpt(32, 4096, 32, 2048), 2),
    "13B": (gpt(40, 5120, 40, 2048), 2),
    "65B": (gpt(80, 8192, 64, 8192), 4),
}
GPUS = (8, 64, 512, 4096)


def plan(n_sequences, pair, model):
    """A row of the table of plans: {heading: text}."""
    layout, step = pair
    n_gpus = math.prod(layout.grid)
    tokens = n_sequences * model.context_length / n_gpus / step.seconds
    ms = {key: f"{1e3 * getattr(step, key):,.0f}" for key in ("compute", "tensor", "context", "pipeline", "data")}
    return {
        "layout": str(layout),
        "micro-batches": f"{step.n_micro} × {layout.rows}",
        "GB": f"{step.memory / 1e9:.0f}",
        **{f"{key} ms": text for key, text in ms.items()},
        "not hidden": f"{1e3 * step.exposed:,.0f}",
        "bubble": f"{step.bubble:.0%}",
        "step ms": f"{1e3 * step.seconds:,.0f}",
        "tokens/s a GPU": f"{tokens:,.0f}",
        "MFU": f"{tokens * model.flops() / PEAK:.0%}",
    }


def plans():
    """The table of PLANS on so many GPUS of 80 GB."""
    rows = {}
    for (name, (model, millions)), n_gpus in itertools.product(PLANS.items(), GPUS):
        batch_size = millions * 2**20 // model.context_length
        best = fastest(model, n_gpus, batch_size)
        rows[f"{name}, {n_gpus:,}"] = plan(batch_size, best[0], model) if best else {}
    return texts(rows)


# -- the command


def main(argv):
    usage = "python -m lab.cluster [config/x.py ...] [--gpus=8] [--memory_gb=80] [--key=value ...]"
    description = "Predicts a config's fastest layouts. Without arguments, prints the plans of docs/parallelism.md."
    parser = Parser(prog="python -m lab.cluster", usage=usage, description=description, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=8, help="processes, eight to a node (default: %(default)s)")
    parser.add_argument("--memory_gb", type=float, default=80, help="of a GPU, in 1e9 bytes (default: %(default)s)")
    options, words = parser.parse_known_args(argv)
    if not argv:
        print(plans())
        return
    if options.gpus < 1:
        raise BadInput(f"--gpus={options.gpus}: expected at least 1")
    config = load_config(words, vars(options))
    if not config.vocab_size:
        raise BadInput("vocab_size=0: the time of a step depends on it; expected a number, such as --vocab_size=50257")
    model = gpt(config.n_layer, config.n_embd, config.n_head, config.context_length, config.padded_vocab_size)
    found = fastest(model, options.gpus, config.batch_size, options.memory_gb)
    if not found:
        raise BadInput(
            f"--gpus={options.gpus}: no layout of batch_size={config.batch_size} fits {options.memory_gb:g} GB; "
            "expected more memory, more GPUs or, if they outnumber the sequences, a larger batch"
        )
    print(texts({str(i): plan(config.batch_size, pair, model) for i, pair in enumerate(found[:10], 1)}))
    print(f"\nOf layouts within {CLOSE - 1:.0%} of the fastest, the simplest comes first.")


if __name__ == "__main__":
    run_script(main)
