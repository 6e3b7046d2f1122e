"""The figures beside the program: each stage's time, memory and loss on every machine in results/.

dropped.js computes the same from a results.json that a reader drops on the page; a test compares the two.
"""

import html
import itertools
import re
from functools import cache

from lab import pages, tables
from lab.pictures import PARTS, parts_of_peak
from lab.results import FORMAT_VERSION, read_results
from lab.summary import UNCHANGED, speedup, summarize
from nanoladder.config import stage_names

MODES = {"ladder": "", "each": ", each stage alone"}  # modes with a row per stage: what to add to the config's name
LEAST = "least"  # the kind of a predicted time, of which only the whole is known
SCALED = ("ms/step", "tokens/s", "efficiency", "sent by a process MB", "tensors GB")


@cache
def figures():
    """The data of the page, as JSON: sets (a machine, a config and a mode), scaling tables, constants of dropped.js."""
    sets = [found for path in sorted(pages.RESULTS.glob("*/*/*")) for found in read_sets(path)]
    ladders = [found for found in sets if found["mode"] == "ladder"]
    return {
        "stages": stage_names(),
        "kinds": tables.KINDS | {LEAST: "least time"},
        "parts": {part: label for part, (label, _) in PARTS.items()},
        "modes": MODES,
        "format_version": FORMAT_VERSION,
        "unchanged": UNCHANGED,
        "same_loss": tables.SAME,
        "scaling_modes": pages.SCALING,
        "default": max(ladders, key=lambda found: sum("seconds" in row for row in found["rows"]))["id"],
        "sets": sets,
        "scaling": {stage: scaling(mode) for stage, mode in pages.SCALING.items()},
    }


def read_sets(path):
    """Yields the sets of a results.json or predict.md; none of another file."""
    name = "/".join(path.parts[-3:-1])
    if path.name == "results.json":
        results = read_results(path)
        for mode in (mode for mode in MODES if mode in results["modes"]):
            yield {"id": f"{name}/{mode}", "name": path.parts[-2] + MODES[mode], **measured(results, mode)}
    if path.name == "predict.md":
        yield {"id": f"{name}/predict", "name": path.parts[-2], **predicted(path.read_text(encoding="utf-8"))}


def measured(results, mode):
    """A mode of a results.json: the machine, the conditions, and the rows with what they gain."""
    rows, before, found = summarize(results, mode), None, []
    for row in rows:
        others = {"naive": rows[0], "before": before if mode == "ladder" else None}
        found.append({"name": row["name"], "note": row["note"], **figures_of(row, others)})
        before = row if "seconds" in row else before
    n_rounds = max((len(row["rounds"]) for row in rows if "rounds" in row), default=0)
    return {
        "machine": tables.device(results),
        "mode": mode,
        "conditions": conditions(results, n_rounds),
        "rows": found,
    }


def figures_of(row, others):
    """The figures of a row: seconds, bytes, and texts as in the tables; those that were not measured are left out.

    others: {"naive" or "before": the row to compare with, or None}.
    """
    figures = {
        "seconds": lambda row: rounded(row["seconds"]),
        "limit": lambda row: rounded(row["limit"]),
        "bound": lambda row: tables.bound(row["limit_bounds"]),
        "limit_kinds": lambda row: {kind: rounded(seconds) for kind, seconds in row["limit_kinds"].items()},
        "kinds": lambda row: {kind: rounded(row["seconds"] * row["shares"][kind]) for kind in tables.KINDS},
        "parts": lambda row: {part: parts_of_peak(row["memory"])[part] for part in PARTS},
        "peak": lambda row: row["peak"],
        "loss": tables.losses,
        "last_loss": lambda row: f"{row['loss']:.4f}",
    }
    found = {name: tables.cell(figure, row) for name, figure in figures.items()}
    for against, other in others.items():
        if other is not None and other is not row and "seconds" in row:
            found[against] = {
                "name": other["name"],
                "speed": tables.cell(lambda row, other=other: speedup(other, row), row),
                "memory": tables.cell(lambda row, other=other: times(other["peak"], row["peak"]), row),
            }
    return {name: figure for name, figure in found.items() if figure != ""}


def times(before, after):
    return f"{before / after:.2f}×"


def rounded(number):
    """A number with six digits: further ones may differ between versions of Python, and then so would the page."""
    return float(f"{number:.6g}")


def conditions(results, n_rounds):
    """[(heading, text)] of the conditions and versions."""
    on, keys = results["machine"], results["keys"]
    versions = {"torch": on["torch"], "Python": on["python"], "CUDA": on["cuda"], "cuDNN": on.get("cudnn")}
    return [
        ["config", " ".join(results["config"])],
        ["a step", f"{keys['batch_size']} × {keys['context_length']} tokens"],
        ["figures", f"medians over up to {n_rounds} processes, each of which times at least {results['steps']} steps"],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)],
        ["code", ", commit ".join(filter(None, [results["code"], results.get("commit")]))],
    ]


def predicted(text):
    """A predict.md in the form of measured(): the least time of a step, all of one kind, and the memory by part."""
    memory = by_name(re.split(" {2,}", line) for line in re.findall("^[a-z].*? {2,}.*", text, re.MULTILINE))
    steps = by_name(re.split(" *[|] *", line)[1:-1] for line in re.findall("^[|].*", text, re.MULTILINE))
    machine, step = re.search("least time of a step on (.*?), every.* steps of (.*? tokens):", text, re.DOTALL).groups()
    rows = [predicted_row(name, memory[name], steps[name]) for name in memory if name in steps]
    for before, row in itertools.pairwise([None, *rows]):
        for against, other in (("naive", rows[0]), ("before", before)):
            if before:
                speed, less = times(other["seconds"], row["seconds"]), times(other["peak"], row["peak"])
                row[against] = {"name": other["name"], "speed": speed, "memory": less}
    said = "least times by the limits of the datasheet, and predicted memory: nothing of this was measured"
    told = [["config", text.splitlines()[0].strip("`")], ["a step", step], ["figures", said]]
    return {"machine": f"{machine}, predicted", "mode": "predict", "conditions": told, "rows": rows}


def by_name(lines):
    """{name: {heading: text}} of the lines of a table, the headings first; * marks a name."""
    _, *headings = next(lines)
    return {name.rstrip("*"): dict(zip(headings, line, strict=True)) for name, *line in lines}


def predicted_row(name, memory, step):
    size = {part: round(1e9 * float(memory[part])) for part in ("weights", "gradients", "optimizer", "activations")}
    size |= {"rest": round(1e9 * float(memory["temporary"])), "peak": round(1e9 * float(memory["peak"]))}
    seconds = float(step["least ms"].replace(",", "")) / 1e3
    kept = parts_of_peak(size)["kept gradients"]
    parts = size | {"kept gradients": size["gradients"] if 2 * kept > size["gradients"] else 0}  # else it is rounding
    return {
        "name": name,
        "note": None,
        "seconds": seconds,
        "kinds": {LEAST: seconds},
        "bound": step["bound by"],
        "parts": {part: parts[part] for part in PARTS},
        "peak": size["peak"],
    }


def static_html(stage):
    """A stage's figures as tables that need no script."""
    scaled = figures()["scaling"].get(stage, [])
    alone = [] if scaled else static_rows(stage)
    texts = [static_table(f"{stage} on each machine", COLUMNS, alone)]
    for found in scaled:
        caption = f"{stage} by number of processes, {found['batch']}: {found['where']}"
        texts.append(static_table(caption, found["headings"], found["cells"]))
    return "\n".join(filter(None, texts)) or "<p>Not measured yet.</p>"


COLUMNS = {  # heading: row of figures() -> text
    "ms/step": lambda row: tables.milliseconds(row["seconds"]),
    "against the stage before": lambda row: against(row, "before", "speed"),
    "against naive": lambda row: against(row, "naive", "speed"),
    "tensors GB": lambda row: f"{row['peak'] / 1e9:.3f}",
    "memory reduction": lambda row: against(row, "naive", "memory"),
    "of the limit": lambda row: f"{row['limit'] / row['seconds']:.0%}" if "limit" in row else "",
    "losses against naive": lambda row: row.get("loss", ""),
}


def against(row, other, figure):
    return row[other][figure] if other in row else ""


def static_rows(stage):
    """Yields the cells of every machine and config that has a row of a stage."""
    for found in figures()["sets"]:
        for row in (row for row in found["rows"] if row["name"] == stage):
            texts = [text(row) for text in COLUMNS.values()] if "seconds" in row else [row["note"] or "not timed"]
            yield [f"{found['machine']}: {found['name']}", *texts]


def static_table(caption, headings, rows):
    """An HTML table; the last cell of a shorter row spans the rest. Empty if there are no rows."""
    body = []
    for name, *texts in rows:
        span = f' colspan="{len(headings) - len(texts) + 1}"' if len(texts) < len(headings) else ""
        cells = [f"<td>{html.escape(text)}</td>" for text in texts[:-1]] + [f"<td{span}>{html.escape(texts[-1])}</td>"]
        body.append(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    lines = [
        f"<table><caption>{html.escape(caption)}</caption>",
        f"<thead><tr><td></td>{head}</tr></thead>",
        *["<tbody>", *body, "</tbody></table>"],
    ]
    return "\n".join(lines) if body else ""


def scaling(mode):
    """[{where, headings, cells, rows}] of a mode by number of processes, one for each results.json that holds it."""
    found = []
    for path in sorted(pages.RESULTS.glob("*/*/results.json")):
        results = read_results(path)
        if mode in results["modes"]:
            rows = [row for row in summarize(results, mode) if "seconds" in row]
            shown = {heading: text for heading, text in tables.columns(rows, mode).items() if heading in SCALED}
            found.append(
                {
                    "where": f"{tables.device(results)}: {' '.join(results['config'])}",
                    "batch": "one batch per process" if mode in tables.PER_PROCESS else "one batch for all processes",
                    "headings": list(shown),
                    "cells": [[row["name"], *(tables.cell(text, row) for text in shown.values())] for row in rows],
                    "rows": [[int(row["name"]), rounded(row["tokens_per_s"]), row.get("peak")] for row in rows],
                }
            )
    return found
