"""Plans runs on many GPUs, on paper: the fastest layouts that fit.

python -m lab.cluster                                      # two tables of docs/parallelism.md
python -m lab.cluster config/x.py --gpus=64 [--key=value]  # the fastest layouts of this config
"""

import itertools
import math
from nanoladder.entry import Parser, run_script

from lab.step_time import ADAPTER, NODE, NVLINK, PEAK, Layout, gpt, predict_step
from lab.tables import markdown
from nanoladder.errors import BadInput
from nanoladder.parallel.mesh import Grid
from nanoladder.parallel.pipeline import STAGES, can_schedule
from nanoladder.run import load_config

FREE = 0.1  # share of a GPU's memory
CLOSE = 1.05  # a simpler layout wins if it takes at most this much longer
PLANS = {  # name: Model, tokens of a step in millions
    "1.5B": (gpt(48, 1600, 25, 1024), 1),
    "6.7B": (gpt(32, 4096, 32, 2048), 2),
    "13B": (gpt(40, 5120, 40, 2048), 2),
    "65B": (gpt(80, 8192, 64, 8192), 4),
}
GPUS = (8, 64, 512, 4096)


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


# -- the tables


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
    return table(rows)


def traffic():
    """The table of what a process sends in a step, by dimension, and of an example: 8 sequences of 6.7B on 8 GPUs."""
    model, n = PLANS["6.7B"][0], 8
    P, L, x = model.n_params, model.n_layer, n * model.context_length * model.n_embd  # x: of the group's tokens
    sent = {
        "data: DDP": ("8·P", 8 * P),
        "`shard=optimizer`": ("(2 + 4)·P", 6 * P),
        "`shard=full`": ("(4·m + 4)·P", 8 * P),
        "tensor": ("(16·L + 12)·x", (16 * L + 12) * x),
        "tensor, `checkpointing=every:1`": ("(22·L + 12)·x", (22 * L + 12) * x),
        "context, by heads": ("16·L·x/n", 16 * L * x / n),
        "context, gathered keys and values": ("8·L·x", 8 * L * x),
    }
    rows = {name: (f"{formula} · (n - 1)/n", number * (n - 1) / n) for name, (formula, number) in sent.items()}
    rows["pipeline"] = "2·4·x", 8 * x
    return table(
        {
            name: {
                "bytes that a process sends": f"`{formula}`",
                "GB": f"{number / 1e9:.2f}",
                "ms in a node": f"{1e3 * number / NVLINK:,.0f}",
                "ms between nodes": f"{1e3 * number / ADAPTER:,.0f}",
            }
            for name, (formula, number) in rows.items()
        }
    )


def table(rows):
    """Markdown of {name: {heading: text}}."""
    headings = max(rows.values(), key=len)
    columns = {heading: lambda row, heading=heading: row.get(heading, "") for heading in headings}
    notes = {name: None if row else "nothing fits" for name, row in rows.items()}
    return markdown(columns, [row | {"name": name, "note": notes[name]} for name, row in rows.items()])


def main(argv):
    usage = "python -m lab.cluster [config/x.py ...] [--gpus=8] [--memory_gb=80] [--key=value ...]"
    description = "Predicts a config's fastest layouts. Without arguments, prints the tables of docs/parallelism.md."
    parser = Parser(prog="python -m lab.cluster", usage=usage, description=description, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=8, help="processes, eight to a node (default: %(default)s)")
    parser.add_argument("--memory_gb", type=float, default=80, help="of a GPU, in 1e9 bytes (default: %(default)s)")
    options, words = parser.parse_known_args(argv)
    if not argv:
        print(traffic(), plans(), sep="\n\n")
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
    print(table({str(i): plan(config.batch_size, pair, model) for i, pair in enumerate(found[:10], 1)}))
    print(f"\nOf layouts within {CLOSE - 1:.0%} of the fastest, the simplest comes first.")


if __name__ == "__main__":
    run_script(main)
