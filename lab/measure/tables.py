"""Renders results as Markdown and for a terminal: the rows of a mode, and where the time and memory of a step go."""

import math
import statistics
import textwrap
from collections.abc import Callable
from operator import itemgetter

from lab.measure.machine import machine_in_words
from lab.measure.stats import LEVEL, times
from lab.measure.summary import row_below, summarize

WIDTH = 80  # characters of a line on a terminal
SAME = 0.01  # nats: a loss that differs more from naive's is that of another model
PER_PROCESS = ("scaling", "scaling-shard")  # modes in which every process has a batch of its own
INTERVALS = f"In brackets: simultaneous {LEVEL:.0%} intervals. ≈ 1: no measurable change."
KINDS = {  # kind of work: heading
    "gemm": "matrix products",
    "attention": "attention",
    "loss": "loss",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "data": "data wait",
    "host": "host",
}

# Figures that a row may lack, as its mode, machine or outcome has none. A column that reads any other name is an error.
FIGURES = {
    *["seconds", "rounds", "turns", "iqr", "first", "later", "limit", "limit_bounds", "time", "hours", "shares"],
    *["tokens_per_s", "mfu", "datasheet_mfu", "attention_kernel", "setting", "processes", "sent", "bubble"],
    *["memory", "peak", "predicted", "resident", "parameters", "reserved", "context", "temporary", "rest", "fits"],
    *["loss", "gap", "val_loss", "learning_rate"],
    *["verdict", "tokens", "step", "alone", "without", "kept", "bpb", "fresh_learning_rate", "ms", "gain"],  # recipe
}


def difference(losses, expected):
    """Describes the first step whose loss is not the expected one; an empty string if there is none."""
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(loss - other) <= SAME:  # one that is not a number differs too
            return f"losses differ from step {step} ({loss:.4f} instead of {other:.4f})"
    return ""


def table(results, mode):
    """A mode's measurements in Markdown: the conditions, the rows, and how to read them."""
    rows = summarize(results, mode)
    text = [f"## {mode}", conditions(results, mode, rows), markdown(columns(rows, mode), rows)]
    if any("gains" in row for row in rows):
        text.append(f"A speed is the mean of the ratios within the rounds, without the extremes. {INTERVALS}")
    text.append(conclusion(rows))
    if profiled := [row for row in rows if "shares" in row]:
        kinds = {label: lambda row, kind=kind: f"{row['shares'][kind]:.1%}" for kind, label in KINDS.items()}
        text += ["Time of a step by kind of work, from one step under torch.profiler:", markdown(kinds, profiled)]
        text += ["Memory of a step by purpose, GB (and bytes per parameter):", markdown(memory_columns(), profiled)]
    if limits := results["modes"][mode]["limits"]:
        text.append(machine_limits(limits, results["machine"]["native_bfloat16"]))
    return "\n\n".join(text)


def rounds(rows):
    """Number of rounds in which rows were timed."""
    return max((len(row["rounds"]) for row in rows if "rounds" in row), default=0)


def timed(results, rows):
    """What a process times: turns or, as it was before there were any, steps."""
    if turns := max((row["turns"] for row in rows if "turns" in row), default=0):
        return f", which took up to {turns} turns in all"
    return f", each of which times at least {results['steps']} steps" if "steps" in results else ""


def conditions(results: dict, mode: str, rows: list[dict]) -> str:
    """Describes the conditions of a mode's rows."""
    keys, machine, each = results["keys"], results["machine"], " per process" if mode in PER_PROCESS else ""
    words = [
        " ".join(results["config"]),
        f"{machine_in_words(machine)}, torch {machine['torch']}",
        f"a step is {keys['batch_size']} × {keys['context_length']} tokens{each}",
        f"medians over up to {rounds(rows)} processes" + timed(results, rows),
    ]
    if mode.startswith("train"):
        words[-1] = "whole training runs, from the same weights on the same batches"
    return f"{'; '.join(words)}."


def brief(results, mode):
    """A mode's measurements for a terminal: a conclusion, then the rows in as many columns as fit."""
    rows = summarize(results, mode)
    read = f" {INTERVALS}" if any("gains" in row for row in rows) else ""
    return on_terminal(conclusion(rows) + read, columns(rows, mode), rows)


def on_terminal(sentence: str, columns: dict[str, Callable], rows: list[dict]) -> str:
    """A sentence, the rows that have figures in a table of WIDTH, and the notes of the others."""
    notes = {}
    for row in rows:
        notes.setdefault(row["note"], []).append(row["name"])
    table = plain(columns, [row for row in rows if not row["note"]]) if None in notes else ""
    reasons = "\n".join(wrapped(f"{', '.join(names)}: {note}") for note, names in notes.items() if note)
    return "\n\n".join(filter(None, [wrapped(sentence), table, reasons]))


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def conclusion(rows):
    """The conclusion of a mode: rows that are wrong, and the best ones."""
    sentences = [f"WRONG: the losses of {row['name']} are not {rows[0]['name']}'s." for row in rows if is_wrong(row)]
    best = {
        "Fastest": lambda row: (-row["tokens_per_s"], f"{row['tokens_per_s']:,.0f} tokens/s, {row['name']}"),
        "Smallest": lambda row: (row["peak"], f"{row['peak'] / 1e9:.3f} GB of tensors, {row['name']}"),
        "Lowest validation loss": lambda row: (row["val_loss"], f"{row['val_loss']:.4f}, {row['name']}"),
    }
    for what, figure in best.items():
        if figures := list(filter(None, (cell(figure, row) for row in rows))):
            sentences.append(f"{what}: {min(figures)[1]}.")
    return " ".join(sentences)


def run_in_words(cost, device, n_steps, mfu, world_size, price):
    """The cost of a run (predict.costs) on devices at a share mfu of their rate. price: of a device's hour, or None."""
    rate = device.peak()
    hours = cost["flops"] / (mfu * rate * world_size * 3600)
    time = f"{three_digits(hours)} hours" if hours >= 1 else f"{60 * hours:.2g} minutes"
    spent = f", {hours * price * world_size:,.2f} at {price:g} an hour" if price else ""
    return wrapped(
        f"{cost['n_params'] / 1e6:.1f} million parameters, {three_digits(cost['tokens'] / 1e6)} million tokens in "
        f"{n_steps} steps: {cost['flops']:.3g} FLOP, {time} on {world_size} × {device.name} at {mfu:.0%} of "
        f"{rate / 1e12:.3g} TFLOP/s{spent}."
    )


def predicted_columns(first, world_size=1, price=None):
    """{heading: row -> text} of the rows of predict.predict_row on a terminal; the first row is the reference."""
    return {
        "peak GB": gigabytes("peak"),
        "memory": lambda row: f"{row['peak'] / first['peak']:.0%}",
        "least ms": lambda row: milliseconds(row["seconds"]),
        "speed": lambda row: f"{first['seconds'] / row['seconds']:.2f}×",
        "hours": lambda row: three_digits(row["hours"]),
        "cost": lambda row: f"{row['hours'] * price * world_size:,.2f}" if price else "",
        "micro-batch": lambda row: f"{row['fits']}",
    }


RUN_COLUMNS = {  # of --mode=predict with --vary, whose rows may be runs of several sizes
    "parameters": lambda row: f"{row['parameters'] / 1e6:,.1f}M",
    "tokens": lambda row: f"{row['tokens'] / 1e6:,.0f}M",
}
TIME_COLUMNS = {  # further columns of --mode=predict
    "bound by": lambda row: bound(row["time"].bounds),
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "MFU": lambda row: f"{row['mfu']:.0%}",
}


def limits_in_words(device):
    """The limits of a devices.Device on which the least time of a step rests."""
    limits = [f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in device.flops.items()]
    limits += [f"memory {device.bytes_per_s / 1e9:.4g} GB/s", f"a launch {1e6 * device.launch_seconds:.2g} µs"]
    return f"At the least time every operation of a step is at its limit ({device.source}: {', '.join(limits)})."


def three_digits(number):
    """Formats a number with three digits, or with all digits before the decimal point if there are more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def machine_limits(limits, native_bfloat16):
    """The line of the machine's own rates. bfloat16 is emulated if it is neither native nor as fast as float32."""
    rates = {name: statistics.median(limit["flops"][name] for limit in limits) for name in limits[0]["flops"]}
    texts = {name: f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items()}
    if not native_bfloat16 and rates["bfloat16"] < rates["float32"]:
        texts["bfloat16"] += " (emulated)"
    copy = statistics.median(limit["copy_bytes"] for limit in limits)
    return f"The machine itself: matrix products {', '.join(texts.values())}; a copy {copy / 1e9:.3g} GB/s."


def columns(rows: list[dict], mode: str) -> dict[str, Callable[[dict], str]]:
    """{heading: row -> text} of the main table of a mode, the most important first; the first row is the reference."""
    first, timed = rows[0], [row["name"] for row in rows if "seconds" in row]
    before = {"against the stage before": lambda row: gain(row, row_below(row["name"], timed))}
    return {
        "ms/step": lambda row: milliseconds(row["seconds"]),
        "validation loss": validation_loss,
        f"against {first['name']}": lambda row: against(first, row),
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "efficiency": lambda row: f"{row['tokens_per_s'] / row['processes'] / first['tokens_per_s']:.0%}",
        "tensors GB": gigabytes("peak"),
        "memory reduction": lambda row: f"{first['peak'] / row['peak']:.2f}×",
        "bubble predicted": lambda row: f"{row['bubble']:.0%}",
        "sent by a process MB": lambda row: f"{row['sent'] / 1e6:.1f}",
        "predicted GB": gigabytes("predicted"),
        **(before if mode == "ladder" else {}),
        "learning rate": lambda row: f"{row['learning_rate']:.2g}",
        "IQR": lambda row: milliseconds(row["iqr"], row["seconds"]),
        "least ms": lambda row: milliseconds(row["limit"]),
        "bound by": lambda row: bound(row["limit_bounds"]),
        "of the limit": lambda row: f"{row['limit'] / row['seconds']:.0%}",
        "of the matmul rate": lambda row: f"{row['mfu']:.0%}",
        "of the datasheet's rate": lambda row: f"{row['datasheet_mfu']:.0%}",
        "resident GB": lambda row: f"{row['resident'] / 1e9:.2f}",
        "reserved GB": lambda row: f"{row['memory']['reserved'] / 1e9:.3f}",
        "first step s (later processes)": lambda row: f"{row['first']:.1f} ({row['later']:.1f})",
        "last loss": lambda row: f"{row['loss']:.4f}",
        f"losses against {first['name']}": losses,
        "setting": lambda row: row["setting"],
        "kernel": lambda row: row["attention_kernel"],
    }


def validation_loss(row):
    return f"{row['val_loss']:.4f}" if row["learning_rate"] and "val_loss" in row else "diverged"


def against(first, row):
    """A row's speed relative to the first's; of a training run, how far its loss is from the first's."""
    return f"{row['val_loss'] - first['val_loss']:+.4f}" if "val_loss" in row else gain(row, first["name"])


def gain(row: dict, other: str | None) -> str:
    """A row's gain over another one; empty if they were timed together in too few rounds."""
    return times(row["gains"][other]) if other in row.get("gains", ()) else ""


def factor(change: dict) -> str:
    """A factor of tokens with its bound and, if it has one, its interval, of a row's figures: 1.22 (1.15–1.28)."""
    text = "{bound}{times:.2f}" + (" ({low:.2f}–{high:.2f})" if "low" in change else "")
    return text.format(**{"bound": ""} | change)


def gigabytes(key: str) -> Callable[[dict], str]:
    return lambda row: f"{row[key] / 1e9:.3f}"


def bound(seconds):
    """The bound with the most seconds, and its share."""
    name = max(seconds, key=seconds.get)
    return f"{name} {seconds[name] / sum(seconds.values()):.0%}"


def milliseconds(seconds: float, of: float | None = None) -> str:
    """Seconds as ms, with a decimal if they, or the seconds that they are a part `of`, are below 100 ms."""
    return f"{1e3 * seconds:.{0 if (of or seconds) > 0.1 else 1}f}"


def losses(row):
    if row["gap"] == 0:
        return "bit-equal"
    if row.get("another_update") and row["gap"] < math.inf:
        return "another update"
    if row["gap"] > SAME and row.get("dropout"):
        return f"{row['gap']:.2g} apart (dropout)"
    return f"within {row['gap']:.0e}" if row["gap"] <= SAME else f"WRONG by {row['gap']:.2g}"


def is_wrong(row):
    return cell(losses, row).startswith("WRONG")


def memory_columns():
    def part_of(part):
        return lambda row: f"{row['memory'][part] / 1e9:.3f} ({row['memory'][part] / row['parameters']:.3g})"

    parts = ("weights", "optimizer", "gradients", "activations", "rest", "temporary", "peak", "context")
    return {part: part_of(part) for part in parts} | {
        "error": lambda row: f"{row['predicted'] / row['peak'] - 1:+.1%}",
    }


def body_of(columns, rows):
    """Lists the lines of a table, each a list of texts: the headings, then the rows, each after its name.

    A cell whose figure was not measured is empty; empty columns go.
    """
    texts = {heading: [cell(text, row) for row in rows] for heading, text in columns.items()}
    kept = [heading for heading in texts if any(texts[heading])] or list(texts)[:1]
    return [["", *kept], *([row["name"], *(texts[heading][i] for heading in kept)] for i, row in enumerate(rows))]


def markdown(columns: dict[str, Callable], rows: list[dict]) -> str:
    """A Markdown table whose source reads well too. The note of a row takes the place of its first figure."""
    body, notes = body_of(columns, rows), {row["note"] for row in rows}
    for line, row in zip(body[1:], rows, strict=True):
        line[1] = row["note"].replace("|", "/") if row["note"] else line[1]
    widths = [max(3, *(len(line[i]) for line in body if line[i] not in notes)) for i in range(len(body[0]))]
    body.insert(1, ["-" * each for each in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in body)


def plain(columns: dict[str, Callable], rows: list[dict]) -> str:
    """A table for a terminal. Columns from the first that does not fit into WIDTH are left out.

    A heading takes as many lines as keep its column as narrow as the texts.
    """
    kept, end = [], -2
    for heading, *texts in zip(*body_of(columns, rows), strict=True):
        width = max(map(len, [*texts, *heading.split()]))
        if (end := end + 2 + width) > WIDTH:
            break
        kept.append((width, textwrap.wrap(heading, width), texts))
    height = max(len(heading) for _, heading, _ in kept)
    lists = [[*[""] * (height - len(heading)), *heading, *texts] for _, heading, texts in kept]
    widths = [width for width, *_ in kept]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*lists, strict=True))


def texts(rows: dict[str, dict[str, str]], table: Callable = markdown) -> str:
    """The table, by markdown or plain, of {row: {heading: text}}."""
    columns = {heading: itemgetter(heading) for heading in next(iter(rows.values()))}
    return table(columns, [row | {"name": name, "note": None} for name, row in rows.items()])


def cell(text: Callable, row: dict) -> str:
    """The text of a row's cell, empty if one of the FIGURES was not measured. Raises KeyError for any other name."""
    try:
        return text(row)
    except KeyError as missing:
        if missing.args[0] not in FIGURES:
            raise
        return ""
