"""The figures beside the program: for each stage and machine a card with the time and memory of a step, as HTML.

A set is a ladder that was measured on a machine: --mode=ladder of a results.json.
"""

from functools import cache
from typing import NamedTuple

from lab import pages, tables
from lab.page.markup import Markup, join, tag
from lab.recipe_report import COLUMNS
from lab.results import read, read_results
from lab.summary import UNCHANGED, row_below, speedup
from nanoladder.config import stage_names
from nanoladder.errors import BadInput

PARTS = {  # part of the peak memory: label
    "weights": "weights",
    "kept gradients": "kept gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "rest": "gradients, temporary",
}
SCALED = ("ms/step", "tokens/s", "efficiency", "sent by a process MB", "tensors GB")


class Set(NamedTuple):
    id: str
    machine: str
    name: str
    conditions: list  # (heading, text)
    rows: dict  # {name: figures of summary.summarize, with kinds {kind: seconds} and parts {part: bytes}}


# -- reading


@cache
def sets(own=()):
    """{id: Set} of the results.json files of a reader, and of ours; the first is what the page opens with.

    Raises BadInput for a file of the reader's that has nothing to show.
    """
    for path in own:
        if not read_results(path)["modes"].keys() & {"ladder", *pages.SCALING.values()}:
            raise BadInput(f"{path} holds no stages; expected a results.json of --mode=ladder or scaling")
    by_id = {}
    for path, results, rows in pages.summaries("ladder", own):
        machine, name = path.resolve().parts[-3:-1]
        key = f"{machine}/{name}"
        by_id.setdefault(key, measured(key, name, results, [dict(row) for row in rows.values()]))
    return by_id


def measured(key, name, results, rows):
    for row in rows:
        if memory := row.get("memory"):  # with the gradients that are kept during the forward, PARTS make up the peak
            kept = memory["peak"] - sum(memory[part] for part in PARTS if part in memory)
            row["parts"] = memory | {"kept gradients": kept}
        if "seconds" in row:
            row["kinds"] = {kind: row["seconds"] * share for kind, share in row.get("shares", {}).items()}
    on, keys = results["machine"], results["keys"]
    versions = {"torch": on["torch"], "Python": on["python"], "CUDA": on["cuda"], "cuDNN": on.get("cudnn")}
    n_rounds = max((len(row["rounds"]) for row in rows if "rounds" in row), default=0)
    conditions = [
        ("config", " ".join(results["config"])),
        ("a step", f"{keys['batch_size']} × {keys['context_length']} tokens"),
        ("figures", f"medians over up to {n_rounds} processes, each of which times at least {results['steps']} steps"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("code", ", commit ".join(filter(None, [results["code"], results.get("commit")]))),
    ]
    return Set(key, tables.machine_in_words(results["machine"]), name, conditions, {row["name"]: row for row in rows})


# -- a card: a machine's figures at a stage


class Chart(NamedTuple):
    title: str
    total: str  # the figure of a row
    parts: str  # the figure that holds its parts
    names: dict  # {part: label}
    text: object  # (value, the whole that it is a part of) -> str
    unit: str


TIME = Chart("Time of a step", "seconds", "kinds", tables.KINDS, tables.milliseconds, "ms")
MEMORY = Chart(
    "Memory of a step",
    "peak",
    "parts",
    PARTS,
    lambda value, whole=None: f"{value / 1e9:.{3 if (whole or value) < 1e10 else 1}f}",
    "GB",
)


def section(stage, own=()):
    """The section on a stage's figures: its scaling on each machine if it needs several processes, then its cards."""
    if pages.group(stage) == "recipe":
        return tag("section", *worth(stage), class_="cards", aria_label="Measured")
    cards = scaling(stage, own) + [card(ladder, stage) for ladder in sets(own).values()]
    return tag("section", *cards, class_="cards", aria_label="Measured")


def card(ladder, stage):
    row = ladder.rows.get(stage, {"note": "not measured here"})
    lines = [part for heading, text in ladder.conditions for part in (tag("dt", heading), tag("dd", text))]
    content = [
        tag("h3", ladder.machine, " ", tag("small", ladder.name)),
        tag("details", tag("summary", "conditions"), tag("dl", *lines), class_="conditions"),
    ]
    if "seconds" in row:
        content += [chart_section(chart, ladder, row) for chart in (TIME, MEMORY) if chart.total in row]
        content += loss(row)
    else:
        content.append(tag("p", f"{stage}: {row['note'] or 'not timed'}.", class_="note"))
    return tag("article", *content, class_="card", data_set=ladder.id)


def chart_section(chart, ladder, row):
    """A chart at a row: what the stage gains, bars of naive, the row before and this one, and the parts in numbers.

    At the first row: a bar of every row.
    """
    named = {name: other for name, other in ladder.rows.items() if "seconds" in other and chart.total in other}
    first, *_ = drawn = list(named.values())
    if row is first:
        before, verdicts, shown = None, [], drawn
    else:
        before = named.get(row_below(row["name"], named), first)
        compared = list({other["name"]: other for other in (before, first)}.values())
        verdicts, shown = [verdict(chart, row, other) for other in compared], [*reversed(compared), row]
    content = [
        tag("h4", chart.title, tag("b", f"{chart.text(row[chart.total])} {chart.unit}")),
        *(tag("p", *said, class_="verdict", data_kind=kind) for kind, *said in verdicts),
        bars(chart, shown, row, max(other[chart.total] for other in drawn)),
        *([tag("p", of_limit(row), class_="fine")] if chart is TIME and of_limit(row) else []),
        parts_table(chart, row, before),
    ]
    return tag("section", *content)


def verdict(chart, row, other):
    """(good, bad or same; the words of how much better than another row it is)."""
    if chart is MEMORY:
        ratio = times(max(other["peak"], row["peak"]), min(other["peak"], row["peak"]))
        if ratio == "1.00×":
            return "same", f"as much memory as {other['name']}"
        kind, more = ("good", "less") if row["peak"] < other["peak"] else ("bad", "more")
        return kind, tag("strong", ratio), f" {more} memory than {other['name']}"
    text = speedup(other, row)
    if text == UNCHANGED:
        return "same", f"{UNCHANGED} against {other['name']}"
    if not text:
        return "same", f"measured once, not compared with {other['name']}"
    ratio, _, spread = text.partition(" (")
    kind = "same" if ratio == "1.00×" else "good" if float(ratio[:-1]) > 1 else "bad"
    spread = tag("small", f" ({spread}") if spread else ""
    return kind, tag("strong", ratio), f" the speed of {other['name']}", spread


def times(before, after):
    return f"{before / after:.2f}×"


def bars(chart, rows, now, scale):
    """A table of rows with a bar each, divided into its parts; a row's name climbs to its stage."""
    lines = []
    for row in rows:
        name, value = row["name"], f"{chart.text(row[chart.total])} {chart.unit}"
        label = tag("a", name, href=f"#{name}") if row is not now and name in stage_names() else name
        parts = {part: row[chart.parts].get(part, 0) for part in chart.names}
        limit = row.get("limit") if chart is TIME else None
        lines.append(line(label, bar(parts, scale, limit), value, **({"class_": "now"} if row is now else {})))
    return table("bars", f"{chart.title}, {chart.unit}", lines)


def line(heading, *cells, **attributes):
    """A row of a table."""
    return tag("tr", tag("th", heading), *(tag("td", cell) for cell in cells), **attributes)


def table(kind, label, lines, headings=()):
    """A table for the eye and, by its label, for a screen reader."""
    head = [tag("thead", tag("tr", *(tag("th", heading) for heading in headings)))] if headings else []
    return tag("table", *head, tag("tbody", *lines), class_=kind, aria_label=label)


def bar(parts, scale, mark=None):
    """A bar of parts {class: value}. Its numbers stand beside it: no screen reader needs the picture."""
    drawn, start = [], 0.0
    for part, value in parts.items():
        width = 100 * max(0.0, value) / scale
        if width >= 0.05:
            drawn.append(f'<path class={part.split()[0]} d="M{start:.1f} 1h{width:.1f}"/>')
        start += width
    if mark:
        drawn.append(f'<path class=limit d="M{100 * mark / scale:.1f} 0v2"/>')
    return Markup(f'<svg viewBox="0 0 100 2" preserveAspectRatio=none aria-hidden=true>{"".join(drawn)}</svg>')


def of_limit(row):
    said = [f"bound by {tables.bound(row['limit_bounds'])}"] if row.get("limit_bounds") else []
    if "limit" in row:
        share, least = row["limit"] / row["seconds"], tables.milliseconds(row["limit"], row["seconds"])
        said.insert(0, f"{share:.0%} of the limit: {least} ms by roofline")
    return ", ".join(said)


def parts_table(chart, row, before):
    """The parts of a row in numbers, with the row before: the key to the colors."""
    values, old, limits = row[chart.parts], (before or {}).get(chart.parts, {}), row.get("limit_kinds", {})
    whole, lines = row[chart.total], []
    headings = ["before"] * bool(before) + ["now", "share"] + ["of its limit"] * bool(chart is TIME and limits)
    for part, label in chart.names.items():
        if part not in values:
            continue
        cells = [chart.text(old.get(part, 0), whole)] if before else []
        cells += [chart.text(values[part], whole), f"{max(0, values[part]) / whole:.0%}"]
        if "of its limit" in headings:
            cells.append(f"{limits[part] / values[part]:.0%}" if limits.get(part) and values[part] else "")
        lines.append(line(join(tag("i", class_=part.split()[0]), label), *cells))
    return table("parts", f"{chart.title} by part", lines, [chart.unit, *headings]) if len(lines) > 1 else ""


def loss(row):
    """[the paragraph on the last loss], empty if it was not profiled."""
    if "loss" not in row:
        return []
    says = {"bit-equal": " to naive’s", "another update": ": not naive’s"}
    against = tables.cell(tables.losses, row)
    text = f" {row['loss']:.4f}" + (f" · {against}{says.get(against, ' of naive’s')}" if against else "")
    return [tag("p", tag("b", "Loss"), text, class_="last", data_kind="bad" if "WRONG" in against else "same")]


# -- stages of several processes


def scaling(stage, own=()):
    """Cards of a stage's throughput by number of processes, one for each results.json that holds it."""
    mode = pages.SCALING.get(stage)
    return [scaling_card(results, mode, rows.values()) for _, results, rows in pages.summaries(mode, own)]


def scaling_card(results, mode, rows):
    """The tokens per second of 1, 2, 4, ... processes as bars, marked where linear scaling would be."""
    rows = [row for row in rows if "seconds" in row]
    first, last = rows[0], rows[-1]
    names = {row["name"]: f"{row['name']} process" + "es" * (row["name"] != "1") for row in rows}
    linear = {name: int(name) * first["tokens_per_s"] / int(first["name"]) for name in names}
    scale = max(*linear.values(), *(row["tokens_per_s"] for row in rows))
    drawn = [
        line(names[name], bar({"gemm": rate}, scale, linear[name]), f"{rate:,.0f}")
        for name, rate in ((row["name"], row["tokens_per_s"]) for row in rows)
    ]
    columns = {heading: text for heading, text in tables.columns(rows, mode).items() if heading in SCALED}
    lines = [line(row["name"], *(tables.cell(text, row) for text in columns.values())) for row in rows]
    batch = "one batch per process" if mode in tables.PER_PROCESS else "one batch for all processes"
    kind = "good" if last["tokens_per_s"] >= first["tokens_per_s"] else "bad"
    ratio = tag("strong", times(last["tokens_per_s"], first["tokens_per_s"]))
    mode_words = f"--mode={mode.replace('-', ' --dimension=')} --processes={last['name']}"
    command = " ".join(["profile.py", *results["config"], mode_words])
    words = [join(tag("span", word), " ") for word in command.split()]  # lines break between options alone
    said = f" the tokens per second of {names[first['name']]}, on {last['name']}"
    return tag(
        "article",
        tag("h3", tables.machine_in_words(results["machine"]), " ", tag("small", batch)),
        tag("h4", "Tokens per second"),
        tag("p", ratio, said, class_="verdict", data_kind=kind),
        table("bars", "Tokens per second", drawn),
        table("parts", "By processes", lines, ["processes", *columns]),
        tag("p", "The marks: linear scaling. ", *words, class_="fine"),
        class_="card",
    )


# -- rungs of the recipe


def worth(stage):
    """Cards of what a rung is worth, one for each recipe.json."""
    paths = sorted(pages.RESULTS.glob("*/*/recipe.json"))
    return [worth_card(path, read(path, {"rows": list})["rows"], stage) for path in paths]


def worth_card(path, rows, stage):
    """The tokens to a loss that the recipe saves up to each rung, as bars, and a rung's figures."""
    row = next((row for row in rows if row["name"] == stage), {"note": "not screened yet"})
    content = [tag("h3", path.parent.parent.name, " ", tag("small", path.parent.name))]
    if row["note"]:
        return tag("article", *content, tag("p", f"{stage}: {row['note']}.", class_="note"), class_="card")
    drawn = [other for other in rows if "tokens" in other]
    scale = max((other["tokens"]["times"] for other in drawn), default=1.0)
    bars = []
    for other in drawn:
        name, times, now = other["name"], other["tokens"]["times"], {"class_": "now"} if other is row else {}
        label = name if now else tag("a", name, href=f"#{name}")
        bars.append(line(label, bar({"gemm": times}, scale, 1.0), f"{times:.2f}×", **now))
    figures = {heading: tables.cell(text, row) for heading, text in COLUMNS.items()}
    lines = [line(heading, text) for heading, text in figures.items() if text]
    kind = {"holds": "good", "costs": "bad"}.get(row["verdict"], "same")
    content += [tag("h4", "Tokens to the same loss"), tag("p", row["verdict"], class_="verdict", data_kind=kind)]
    content += [table("bars", "Times fewer tokens than the base", bars)] if bars else []
    fine = tag("p", "Bars: times fewer tokens than the base, up to this rung. The mark: the base.", class_="fine")
    return tag("article", *content, fine, table("parts", "Figures of the rung", lines), class_="card")


def options(own=()):
    """The machines to choose from, as options of a list."""
    names = {key: f"{each.machine.replace(', native bfloat16', '')}: {each.name}" for key, each in sets(own).items()}
    return join(*(tag("option", name, value=key) for key, name in names.items()))
