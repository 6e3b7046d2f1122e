"""Two results.json side by side."""

from lab.results import CONDITIONS
from lab.summary import speedup, summarize
from lab.tables import markdown, milliseconds


def compare(a, b):
    """Two results side by side, machines, versions or commits: what differs in their conditions, then the rows."""
    text = []
    for key in ("commit", *CONDITIONS):
        ours, theirs = a.get(key), b.get(key)
        if isinstance(ours, dict):
            changed_keys = [name for name in ours if ours[name] != theirs.get(name)]
            ours, theirs = ({name: side.get(name) for name in changed_keys} for side in (ours, theirs))
        if ours != theirs:
            text += [f"A  {key}: {ours}", f"B  {key}: {theirs}"]
    for mode in a["modes"]:
        if mode in b["modes"]:
            text += ["", f"## {mode}", "", side_by_side(summarize(a, mode), summarize(b, mode))]
    return "\n".join(text)


def side_by_side(ours, theirs):
    theirs = {row["name"]: row for row in theirs}
    shared = [(row["name"], row) for row in ours if row["name"] in theirs]
    pairs = [{"name": name, "note": None, "A": row, "B": theirs[name]} for name, row in shared]
    if not pairs:
        return "no row in common"
    first = pairs[0]
    columns = {}
    for side in "AB":
        columns[f"{side} ms/step"] = lambda pair, side=side: milliseconds(pair[side]["seconds"])
    columns["A/B"] = lambda pair: f"{pair['A']['seconds'] / pair['B']['seconds']:.2f}"
    for side in "AB":
        columns[f"{side} against {first['name']}"] = lambda pair, side=side: speedup(first[side], pair[side])
    for side in "AB":
        columns[f"{side} tensors GB"] = lambda pair, side=side: f"{pair[side]['peak'] / 1e9:.3f}"
    return markdown(columns, pairs)
