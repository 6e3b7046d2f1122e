"""The figures of the first ladder: for each stage and machine a card with the time and memory of a step, as HTML.

A machine's figures at the stages are those of --mode=ladder in a runs.jsonl.
"""

from typing import NamedTuple

from lab.measure import tables
from lab.measure.machine import machine_in_words
from lab.measure.summary import row_below
from lab.programs import figures, sentences
from lab.programs.html.elements import bars_table, card, join, table, tag


class Chart(NamedTuple):
    title: str
    unit: str
    total: str  # the figure of a row
    mark: str  # the figure that is marked in its bar
    parts: object  # row -> {part: value}
    names: dict  # {part: label}
    text: object  # (value, the whole that it is a part of) -> str


def time_parts(row):
    return {kind: row["seconds"] * row["shares"][kind] for kind in tables.KINDS if "shares" in row}


def memory_parts(row):
    """The parts of the peak; the remainder is gradients that are kept during the forward."""
    parts = {part: row["memory"][part] for part in PARTS if part in row.get("memory", ())}
    return parts | {"kept gradients": row["peak"] - sum(parts.values())} if parts else {}


def gigabytes(size, whole=None):
    return f"{size / 1e9:.3f}"


PARTS = {"weights": "weights", "optimizer": "optimizer state", "activations": "activations"}
PARTS |= {"rest": "gradients, temporary", "kept gradients": "kept gradients"}
TIME = Chart("Time of a step", "ms", "seconds", "limit", time_parts, tables.KINDS, tables.milliseconds)
MEMORY = Chart("Memory of a step", "GB", "peak", "none", memory_parts, PARTS, gigabytes)


def options(paths=()):
    """The machines to choose from, as the options of a list."""
    ladders = figures.measured("ladder", paths).items()
    names = {key: f"{machine_in_words(each.results['machine'])}: {key.partition('/')[2]}" for key, each in ladders}
    return join(*(tag("option", name, value=key) for key, name in names.items()))


def section(stage):
    """The section on a stage's figures: its scaling on each machine if it needs several processes, then its cards."""
    cards = [
        stage_card(measured, stage.name) if measured.mode == "ladder" else scaling_card(measured)
        for measured in stage.figures
    ]
    return tag("section", *cards, class_="cards", aria_label="Measured")


def stage_card(measured, stage):
    """A machine's figures at a stage."""
    key, _, results, rows = measured
    row = rows.get(stage, {"name": stage, "note": "not measured here"})
    content = [chart_section(chart, rows, row) for chart in (TIME, MEMORY) if "seconds" in row and chart.total in row]
    if not content:
        content = [tag("p", f"{stage}: {row['note'] or 'not timed'}.", class_="note")]
    columns = tables.columns(list(rows.values()), "ladder")
    details = [tag("p", tables.conditions(results, "ladder", rows.values())), figures_table(columns, row)]
    content.append(tag("details", tag("summary", "figures"), *details, class_="figures"))
    return card(machine_in_words(results["machine"]), key.partition("/")[2], *content, data_set=key)


def figures_table(columns, row):
    cells = [(heading, tables.cell(column, row)) for heading, column in columns.items()]
    return table("parts", "Figures", [(heading, text) for heading, text in cells if text])


def chart_section(chart, rows, row):
    """A chart at a row: what the stage gains, bars of naive, the row before and this one, and the parts in numbers.

    At the first row: a bar of every row.
    """
    timed = {name: other for name, other in rows.items() if "seconds" in other and chart.total in other}
    first = next(iter(timed.values()))
    before = timed.get(row_below(row["name"], timed), first)
    others = {other["name"]: other for other in (first, before) if row is not first}
    drawn = [*others.values(), row] if others else list(timed.values())
    totals = {other["name"]: f"{chart.text(other[chart.total])} {chart.unit}" for other in drawn}
    bars = [(totals[each["name"]], each["name"], chart.parts(each), each.get(chart.mark)) for each in drawn]
    numbers = []
    for part, value in chart.parts(row).items():
        texts = [chart.text(each, row[chart.total]) for each in (chart.parts(before).get(part, 0), value)]
        numbers.append((join(tag("i", class_=part.split()[0]), chart.names[part]), *texts))
    return tag(
        "section",
        tag("h4", chart.title, tag("b", totals[row["name"]])),
        *(verdict(chart, row, other) for other in reversed(others.values())),
        bars_table(chart.title, bars, row["name"], max(other[chart.total] for other in timed.values())),
        table("parts", f"{chart.title} by part", numbers, [chart.unit, "before", "now"]) if numbers else "",
    )


def verdict(chart, row, other):
    """Compares a row with another one, as text; good, bad or the same."""
    if chart is MEMORY:
        text = sentences.memory(row["peak"], other["peak"])
        kind = {"less": "good", "more": "bad"}.get(text.rpartition(" ")[2], "same")
        words = f" memory {'as' if kind == 'same' else 'than'} {other['name']}"
        return tag("p", tag("strong", text), words, class_="verdict", data_kind=kind)
    interval = row.get("gains", {}).get(other["name"])
    if interval is None:
        return tag("p", f"too few rounds to compare with {other['name']}", class_="verdict")
    ratio, _, limits = tables.gain(row, other["name"]).partition(" (")
    if not interval.significant:
        return tag("p", f"no measurable change ({limits} against {other['name']}", class_="verdict")
    kind = "good" if interval.middle > 0 else "bad"
    words = f" the speed of {other['name']} ", tag("small", f"({limits}")
    return tag("p", tag("strong", ratio), *words, class_="verdict", data_kind=kind)


def scaling_card(measured):
    """The tokens per second of 1, 2, 4, ... processes as bars, marked where linear scaling would be."""
    _, mode, results, rows = measured
    rates = {row["name"]: row["tokens_per_s"] for row in rows.values() if "seconds" in row}
    if not rates:
        return card(machine_in_words(results["machine"]), mode, tag("p", "not timed.", class_="note"))
    (first, rate), (last, most) = (list(rates.items())[n] for n in (0, -1))
    linear = {n: int(n) * rate / int(first) for n in rates}
    bars = [
        (f"{rates[n]:,.0f}", "1 process" if n == "1" else f"{n} processes", {"gemm": rates[n]}, linear[n])
        for n in rates
    ]
    ratio = tag("strong", f"{most / rate:.2f}×")
    return card(
        machine_in_words(results["machine"]),
        "one batch per process" if mode in tables.PER_PROCESS else "one batch for all processes",
        tag("h4", "Tokens per second"),
        tag(
            "p",
            ratio,
            f" the tokens of {first} process, on {last}",
            class_="verdict",
            data_kind="good" if most >= rate else "bad",
        ),
        bars_table("Tokens per second", bars, None, max(*linear.values(), *rates.values())),
        tag("p", f"The marks: linear scaling. {tables.conditions(results, mode, rows.values())}", class_="fine"),
    )
