"""Predicts the time and the memory of a step in any layout of GPUs, from a few rates: nothing runs.

A GPU computes at a constant rate, and a group's traffic moves at the rate of its slowest link. Weights and gradients
move while the processes compute; they wait for activations. lab/cluster.py prints the tables.
"""

from dataclasses import dataclass

from nanoladder.machine.device import PEAK_TFLOPS
from nanoladder.parallel.mesh import Grid
from nanoladder.parallel.pipeline import STAGES, predict_bubble

PEAK = PEAK_TFLOPS["H100"] * 1e12  # FLOP/s in bfloat16
RATE = 0.41 * PEAK  # while it computes: Megatron-Core's 1.7B, which is not cut (cluster.py)
HBM = 3.35e12  # bytes/s of a GPU's memory (H100's datasheet)
NODE = 8  # GPUs
NVLINK = 0.75 * 450e9  # bytes/s that a GPU sends within a node: three quarters of the datasheet's
ADAPTER = 0.75 * 400e9 / 8  # bytes/s that a GPU sends through its own adapter to another node
HOP = 5e-6  # seconds for each hop of a ring
ACTIVATIONS = 2 * 4 + 14 * 2  # bytes that a block keeps, per number of its width: the norms' inputs are float32


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
