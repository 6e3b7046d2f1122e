"""Counts what the processes exchange in a step, and holds it against formulas."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoladder import parallel
from nanoladder.config import gathers_keys
from nanoladder.parallel.pipeline import STAGES
from nanoladder.run.memory import count_micro_batches

HEADING = """
What a process hands to collectives in a step, the mean over processes: calls, bytes measured, bytes by the formula, and
their ratio. Bytes are those of the larger of a call's input and output. On the wire, a ring of n sends (n - 1) / n of
them, for an all_reduce twice that, and a send all. Letters: W weights of a process, A = 4 T C bytes of activations of
its T tokens, L layers, C width, V token ids, m micro-batches, n processes that share a copy, t, c, p processes along
tensor, context, pipeline, v stages of a process.
"""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def kind_of(operator):
    """The kind of message of a c10d operator, which DDP, FSDP2 and pipelines call, or of a functional one of DTensor.

    None of any other. Their names are those of the kinds with other underscores, and more words.
    """
    if operator.namespace in ("c10d", "_c10d_functional"):
        name = operator._schema.name.replace("_", "")
        return next((kind for kind in KINDS if kind.replace("_", "") in name), None)
    return None


class Counter(TorchDispatchMode):
    """Counts this process's collectives and sends, {kind: [calls, bytes]}, in eager code (sent).

    Bytes are those of the larger of a call's input and output: an all_gather's output, a reduce_scatter's input. A
    ring sends (n-1)/n of them, an all_reduce twice that. Groups of one process send nothing and are left out.
    """

    def __init__(self):
        super().__init__()
        self.sent = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors' operators come by themselves
        result = operator(*args, **(kwargs or {}))
        kind = kind_of(operator)
        if kind and group_size(args) > 1:
            self.sent[kind][0] += 1
            self.sent[kind][1] += max(n_bytes(part) for part in (*args, result))
        return result


def n_bytes(part):
    """Bytes of a tensor, or of all those in a list."""
    return sum(leaf.nbytes for leaf in tree_leaves(part) if torch.is_tensor(leaf))


def group_size(args):
    """Number of processes of the group among a collective's arguments: an object, or its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg).size()
        if isinstance(arg, dist.ProcessGroup):
            return arg.size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()


# -- formulas


def formulas(config, n_params):
    """Lists (applies, kind, bytes, text with source): what a process hands to a kind of collective in a step.

    In float32, means over the processes of parallel.mesh(); letters as in HEADING. n_params: parameters of the whole
    model, without padded token ids. Li et al. 2020 is DDP; Rajbhandari et al. 2020 ZeRO, Zhao et al. 2023 FSDP;
    Korthikanti et al. 2022 tensor and sequence parallelism; Jacobs et al. 2023 exchanges heads, Llama team 2024 gathers
    keys and values; Narayanan et al. 2021 has the pipeline's schedules.
    """
    mesh = parallel.mesh()
    (p, data, c, t), n, averaging = mesh.sizes, mesh.n_sharing, mesh.averaging  # the last: data × context
    C, L, V, bias, tp = config.n_embd, config.n_layer, config.padded_vocab_size, config.bias, t * p
    A = 4 * C * (config.batch_size // data) * (config.context_length // c)
    m, v = count_micro_batches(config, math.prod(mesh.sizes)), STAGES[config.pipeline_schedule]
    norm, positions = C * (1 + bias), C * config.context_length
    uncut = 2 * L * (norm + bias * C)  # of the blocks: norms, and biases after a sum over processes
    blocks = (n_params - config.vocab_size * C - positions - norm - uncut) / t + uncut
    W = (blocks + (1 + (p > 1)) * V * C / t + positions + norm) / p
    gathers = m * (W + blocks) if p == 1 else W  # a stage keeps what it has gathered
    sums = 4 * (m if averaging == 1 else 1) * ((2 * L + 1) * norm + positions) / p  # FSDP2 sums micro-batches first
    n_tensors = ((6 * L + 1) * (1 + bias) + 2) / p
    scalars = 12 + 4 * n_tensors * ((n > 1) + (t > 1)) + 4 * (p > 1)
    by_keys = c > 1 and gathers_keys(config)  # context parallelism exchanges keys and values, not heads
    return [
        (averaging > n == 1, "all_reduce", 4 * W, "4 W: gradients (Li 2020)"),
        (averaging > n > 1, "all_reduce", 4 * W / n, "4 W / n: shards of gradients, between copies (Zhao 2023)"),
        (n > 1, "reduce_scatter", 4 * W, "4 W: gradients (Rajbhandari 2020)"),
        (n > 1 and config.shard == "optimizer", "all_gather", 4 * W, "4 W: weights (Rajbhandari 2020)"),
        (n > 1 and config.shard == "full", "all_gather", 4 * gathers, "4 m (W + W of blocks) (Zhao 2023)"),
        (t > 1, "all_gather", (4 * L + 2) * A / p, "(4 L + 2) A / p (Korthikanti 2022)"),
        (t > 1, "reduce_scatter", (4 * L + 2) * A / p, "(4 L + 2) A / p (Korthikanti 2022)"),
        (t > 1, "all_reduce", sums, "4 m (norms + positions) / p (Korthikanti 2022)"),
        (c > 1 and not by_keys, "all_to_all", 8 * L * A / tp, "8 L A / (t p): q, k, v, y and back (Jacobs 2023)"),
        (by_keys, "all_gather", 2 * L * c * A / tp, "2 L c A / (t p): k and v (Llama 2024)"),
        (by_keys, "reduce_scatter", 2 * L * c * A / tp, "2 L c A / (t p): back (Llama 2024)"),
        (p > 1, "send", 2 * (p * v - 1) * A / tp, "2 (v p - 1) A / (t p): activations and back (Narayanan 2021)"),
        (p > 1, "send", 8 * V * C / (n * tp), "8 V C / (n t p): gradients of the tied weight"),
        (averaging * tp > 1, "all_reduce", scalars, "counts and norms"),
    ]


def expected(config, n_params):
    """{kind: [bytes, formulas as text]} that a process hands to each kind of collective in a step, on average."""
    found = {}
    for applies, kind, size, text in formulas(config, n_params):
        if applies:
            total, texts = found.get(kind, (0, []))
            found[kind] = total + size, [*texts, text]
    return found


def explanation(rows):
    """The table of --explain as text: for each run and kind of collective, what was sent beside its formula."""
    lines = []
    for row in rows:
        if not any(row.get("sent", [])):
            continue
        lines.append(row["name"])
        for kind in KINDS:
            sent = [process.get(kind, (0, 0)) for process in row["sent"]]
            calls, measured = (sum(numbers) / len(sent) for numbers in zip(*sent, strict=True))
            formula, texts = row["expected"].get(kind, (0, ["none"]))
            if measured or formula:
                close = f"{measured / formula:.3f}" if formula else "-"
                lines.append(
                    f"  {kind:<14} {calls:>6.4g} calls {measured:>14,.0f} B {formula:>14,.0f} B {close:>6}  "
                    f"{' + '.join(texts)}"
                )
    return "\n".join([HEADING, *lines])
