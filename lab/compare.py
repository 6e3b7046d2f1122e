"""Compares two results.json."""

from lab.results import CONDITIONS
from lab.summary import summarize
from lab.tables import markdown, milliseconds


def compare(a, b):
    """The text that compares two results, of two machines, versions or commits: their conditions, then their rows.

    Of the conditions only those that differ are shown, and of the modes those that both have.
    """
    text = []
    for key in ("commit", *CONDITIONS):
        in_a, in_b = a.get(key), b.get(key)
        if isinstance(in_a, dict):
            differing = [name for name in in_a | in_b if in_a.get(name) != in_b.get(name)]
            in_a, in_b = ({name: side.get(name) for name in differing} for side in (in_a, in_b))
        if in_a != in_b:
            text += [f"A  {key}: {in_a}", f"B  {key}: {in_b}"]
    for mode in a["modes"]:
        if mode in b["modes"]:
            text += ["", f"## {mode}", "", table_of_pairs(summarize(a, mode), summarize(b, mode))]
    return "\n".join(text)


def table_of_pairs(rows_a, rows_b):
    """The Markdown table of the rows that two results have in common."""
    of_b = {row["name"]: row for row in rows_b}
    pairs = [
        {"name": row["name"], "note": None, "A": row, "B": of_b[row["name"]]} for row in rows_a if row["name"] in of_b
    ]
    if not pairs:
        return "no row in common"
    columns = {}
    for side in "AB":
        columns[f"{side} ms/step"] = lambda pair, side=side: milliseconds(pair[side]["seconds"])
    columns["A/B"] = lambda pair: f"{pair['A']['seconds'] / pair['B']['seconds']:.2f}"
    for side in "AB":
        columns[f"{side} tensors GB"] = lambda pair, side=side: f"{pair[side]['peak'] / 1e9:.3f}"
    return markdown(columns, pairs)
