"""Sets predictions of step_time.py beside published figures, in Markdown: the second table of docs/parallelism.md.

python -m lab.published
"""

import dataclasses
import math
from nanoladder.entry import Parser, run_script

from lab.cluster import table
from lab.step_time import PEAK, Layout, Model, gpt, predict_step
from nanoladder.parallel.mesh import Grid


def llama(n_layer, n_embd, n_head, n_hidden, context_length=8192):
    """A Model of Llama 3: gated MLPs of n_hidden, 8 heads of keys and values, an untied head for 128,256 tokens."""
    block = n_embd * (2 * n_embd + 16 * n_embd // n_head + 3 * n_hidden + 2)
    head = 128256 * n_embd
    return Model(n_layer, n_embd, n_head, context_length, block, 2 * head + n_embd, head)


def megatron(n_layer, n_embd, n_head):
    """A Model of Megatron-Core's benchmark: a GPT with an untied head for 131,072 tokens."""
    head = 131072 * n_embd
    return dataclasses.replace(gpt(n_layer, n_embd, n_head, 4096), outside=2 * head, head=head)


LLAMA_8B, LLAMA_70B = llama(32, 4096, 32, 14336), llama(80, 8192, 64, 28672)
# Source: rows of (Model, Layout, sequences a step, published figure, its unit for a GPU). The source's first row gives
# the rate of its GPUs. Megatron-Core's and Llama 3's micro-batches and schedules are ours.
PUBLISHED = {
    "torchtitan": [
        (LLAMA_8B, Layout(Grid(data=8), "full", 8, 2, False), 16, 6667, "tokens/s"),
        (LLAMA_8B, Layout(Grid(data=128), "full", 128, 2, False), 256, 6514, "tokens/s"),
        (LLAMA_8B, Layout(Grid(data=8, tensor=8), "full", 8, 12, False), 96, 4378, "tokens/s"),
        (LLAMA_70B, Layout(Grid(data=32, tensor=8), "full", 32, 16, True), 512, 597.3, "tokens/s"),
    ],
    "Megatron-Core": [
        (
            megatron(n_layer, n_embd, n_head),
            Layout(Grid(pipeline, 48, 1, tensor), "optimizer", 48, 4 if pipeline == 1 else 1, False, "interleaved"),
            batch_size,
            tflops,
            "TFLOP/s",
        )
        for n_layer, n_embd, n_head, tensor, pipeline, batch_size, tflops in (
            (24, 2048, 16, 1, 1, 192, 408.8),
            (30, 4096, 32, 2, 1, 192, 465.9),
            (32, 6144, 48, 4, 1, 192, 489.1),
            (48, 7168, 56, 8, 1, 192, 459.6),
            (84, 8192, 64, 8, 2, 384, 419.7),
            (96, 12288, 96, 8, 6, 1152, 432.8),
            (112, 18432, 144, 8, 16, 3072, 459.9),
        )
    ],
    "Llama 3": [
        (
            llama(126, 16384, 128, 53248, context_length),
            Layout(Grid(16, data, context, 8), "optimizer", data * context, 1, False, "interleaved"),
            2**24 // context_length,
            tflops,
            "TFLOP/s",
        )
        for context_length, data, context, tflops in ((8192, 64, 1, 430), (8192, 128, 1, 400), (131072, 8, 16, 380))
    ],
}


def rate_of(row):
    """FLOP/s of a computing GPU with which a published row is predicted as it was measured."""
    rate = PEAK
    for _ in range(50):
        rate *= measured(row) / predicted(row, rate, hidden=False)
    return rate


def measured(row):
    """FLOP/s of a GPU in a published row."""
    model, _, _, figure, unit = row
    return figure * (model.flops() if unit == "tokens/s" else 1e12)


def predicted(row, rate, hidden):
    """FLOP/s of a GPU, predicted; hidden: if all that tensor and context parallelism send hid behind the compute."""
    model, layout, batch_size, *_ = row
    step = predict_step(model, layout, batch_size, rate)
    seconds = step.seconds - hidden * (step.tensor + step.context) / (1 - step.bubble)
    return batch_size * model.context_length * model.flops() / math.prod(layout.grid) / seconds


def published():
    """The table of PUBLISHED beside what is predicted."""
    rows = {}
    for source, of_source in PUBLISHED.items():
        rate = rate_of(of_source[0])
        for row in of_source:
            model, layout, _, figure, unit = row
            name = f"{source} {model.n_params / 1e9:.3g}B, {math.prod(layout.grid):,}"
            name += f", context {model.context_length:,}" * (name in rows)
            flops = measured(row), predicted(row, rate, hidden=False), predicted(row, rate, hidden=True)
            shares = [f"{figure / PEAK:.0%}" for figure in flops]
            rows[name] = {
                "layout": str(layout),
                "published": f"{figure:,} {unit}",
                "MFU": shares[0],
                "predicted": "gives the rate" if row is of_source[0] else shares[1],
                "if it hid": shares[2] if shares[2] != shares[1] else "",
            }
    return table(rows)


def main(argv):
    description = "Sets predicted training steps beside published figures."
    Parser(prog="python -m lab.published", description=description, allow_abbrev=False).parse_args(argv)
    print(published())


if __name__ == "__main__":
    run_script(main)
