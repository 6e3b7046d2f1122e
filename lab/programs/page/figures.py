"""The figures of the first ladder: for each stage and machine a card with the time and memory of a step, as HTML.

A machine's figures at the stages are those of --mode=ladder in a runs.jsonl.
"""

from typing import NamedTuple

from lab.measure import tables
from lab.measure.summary import row_below
from lab.programs import pages
from lab.programs.page.markup import Markup, join, tag

UNCHANGED = "no measurable change"


class Chart(NamedTuple):
    title: str
    compared: str
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
TIME = Chart("Time of a step", "the speed of", "ms", "seconds", "limit", time_parts, tables.KINDS, tables.milliseconds)
MEMORY = Chart("Memory of a step", "as small as", "GB", "peak", "none", memory_parts, PARTS, gigabytes)


def options(own=()):
    """The machines to choose from, as the options of a list."""
    ladders = pages.summaries("ladder", own).items()
    names = {key: tables.machine_in_words(results["machine"]) for key, (results, _) in ladders}
    names = {key: f"{name.removesuffix(', native bfloat16')}: {key.partition('/')[2]}" for key, name in names.items()}
    return join(*(tag("option", name, value=key) for key, name in names.items()))


def section(stage, own=()):
    """The section on a stage's figures: its scaling on each machine if it needs several processes, then its cards."""
    cards = [stage_card(key, results, rows, stage) for key, (results, rows) in pages.summaries("ladder", own).items()]
    if mode := pages.SCALING.get(stage):
        cards = [scaling_card(results, mode, rows) for results, rows in pages.summaries(mode, own).values()] + cards
    return tag("section", *cards, class_="cards", aria_label="Measured")


def card(machine, name, *content, **attributes):
    return tag("article", tag("h3", machine, " ", tag("small", name)), *content, class_="card", **attributes)


def stage_card(key, results, rows, stage):
    """A machine's figures at a stage."""
    row = rows.get(stage, {"name": stage, "note": "not measured here"})
    content = [chart_section(chart, rows, row) for chart in (TIME, MEMORY) if "seconds" in row and chart.total in row]
    if not content:
        content = [tag("p", f"{stage}: {row['note'] or 'not timed'}.", class_="note")]
    columns = tables.columns(list(rows.values()), "ladder")
    figures = [tag("p", tables.conditions(results, "ladder", rows.values())), figures_table(columns, row)]
    content.append(tag("details", tag("summary", "figures"), *figures, class_="figures"))
    return card(tables.machine_in_words(results["machine"]), key.partition("/")[2], *content, data_set=key)


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
    text = f"{other['peak'] / row['peak']:.2f}×" if chart is MEMORY else tables.gain(row, other["name"])
    if "×" not in text:
        words = f"{text.replace('≈ 1', UNCHANGED)} against" if text else "too few rounds to compare with"
        return tag("p", f"{words} {other['name']}", class_="verdict")
    ratio, _, interval = text.partition(" ")
    kind = "same" if ratio == "1.00×" else "good" if float(ratio[:-1]) > 1 else "bad"
    words = f" {chart.compared} {other['name']} "
    return tag("p", tag("strong", ratio), words, tag("small", interval), class_="verdict", data_kind=kind)


def bars_table(label, bars, now, scale):
    """A table of bars, (text, name, {part: value}, mark), divided into their parts; a name is a link to the stage."""
    rows = []
    for text, name, parts, mark in bars:
        paths, start = [], 0.0
        for part, value in parts.items():
            width = 100 * max(0.0, value) / scale
            if width >= 0.05:
                paths.append(f'<path class={part.split()[0]} d="M{start:.1f} 1h{width:.1f}"/>')
            start += width
        if mark:
            paths.append(f'<path class=limit d="M{100 * mark / scale:.1f} 0v2"/>')
        # The numbers stand beside it: no screen reader needs the picture.
        picture = f'<svg viewBox="0 0 100 2" preserveAspectRatio=none aria-hidden=true>{"".join(paths)}</svg>'
        link = tag("a", name, href=f"#{name}") if name in pages.BOTH and name != now else name
        rows.append((link, Markup(picture), text))
    return table("bars", label, rows, now=now)


def table(kind, label, rows, headings=(), now=None):
    """A table for the eye and, by its label, for a screen reader. now: heading of the row that is marked."""
    head = [tag("thead", tag("tr", *(tag("th", heading) for heading in headings)))] if headings else []
    lines = []
    for heading, *cells in rows:
        marked = {"class_": "now"} if heading == now else {}
        lines.append(tag("tr", tag("th", heading), *(tag("td", cell) for cell in cells), **marked))
    return tag("table", *head, tag("tbody", *lines), class_=kind, aria_label=label)


def scaling_card(results, mode, rows):
    """The tokens per second of 1, 2, 4, ... processes as bars, marked where linear scaling would be."""
    rates = {row["name"]: row["tokens_per_s"] for row in rows.values() if "seconds" in row}
    if not rates:
        return card(tables.machine_in_words(results["machine"]), mode, tag("p", "not timed.", class_="note"))
    (first, rate), *_ = measured = list(rates.items())
    last, most = measured[-1]
    linear = {n: int(n) * rate / int(first) for n in rates}
    bars = [
        (f"{rates[n]:,.0f}", "1 process" if n == "1" else f"{n} processes", {"gemm": rates[n]}, linear[n])
        for n in rates
    ]
    ratio = tag("strong", f"{most / rate:.2f}×")
    return card(
        tables.machine_in_words(results["machine"]),
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
