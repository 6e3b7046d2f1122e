"""What profile.py measured, as tables and pictures. results.json holds every process; this takes the medians."""

import json
import statistics
from pathlib import Path

from config import BadInput
from report import write_atomically

FORMAT_VERSION = 2
SAME = 0.01  # nats: a loss further from naive's than this is another model's
KNEE = 0.95  # of the best throughput of a sweep
UNCHANGED = "no measurable change"
KINDS = {  # of a step's time, with what each is called and drawn in
    "gemm": ("matrix products", "tab:blue"),
    "attention": ("attention", "tab:purple"),
    "loss": ("loss", "tab:red"),
    "elementwise": ("elementwise", "tab:green"),
    "optimizer": ("optimizer", "tab:olive"),
    "data": ("data wait", "tab:cyan"),
    "host": ("host", "tab:gray"),
}
PARTS = {  # of the peak of memory
    "weights": ("weights", "tab:blue"),
    "gradients": ("gradients", "tab:cyan"),
    "optimizer": ("optimizer state", "tab:olive"),
    "rest": ("activations, temporary", "tab:orange"),
}


def read(path):
    """A results.json. Raises BadInput if it is none of this version."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        version = results["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a results.json of profile.py ({error!r}); expected one") from None
    if version != FORMAT_VERSION:
        raise BadInput(f"{path} has format {version}; expected format {FORMAT_VERSION}: measure again")
    return results


def write(folder, results):
    """Writes results.json and table.md."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(folder / "table.md", "\n\n".join(table(results, mode) for mode in results["modes"]) + "\n")


def summarize(results, mode):
    """A dict a row, in the order measured; what is not measured (yet) is absent. Bytes, seconds, nats, FLOP/s."""
    part = results["modes"][mode]
    rows = []
    for name, measured in part["rows"].items():
        row = {"name": name, "note": measured["note"]}
        for found in measured.get("examine", []):
            first = next(other["examine"][0]["losses"] for other in part["rows"].values() if other.get("examine"))
            memory = found["memory"]
            held = memory["weights"] + memory["gradients"] + memory["optimizer"]
            row |= {
                "gap": max(abs(ours - theirs) for ours, theirs in zip(found["losses"], first, strict=True)),
                "memory": memory | {"rest": memory["peak"] - held},
                "peak": memory["peak"],
                "shares": found["time_by_kind"],
                "parameters": found["parameters"],
                "predicted": measured.get("predicted"),
            }
        if timed := measured.get("time"):
            seconds = [process["seconds"] for process in timed]
            quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [0, 0, 0]
            row |= {
                "seconds": statistics.median(seconds),
                "iqr": quartiles[2] - quartiles[0],
                "range": max(seconds) - min(seconds),
                "repeats": len(seconds),
                "first": max(process["first_step_seconds"] for process in timed),
                "tokens_per_s": timed[0]["tokens"] / statistics.median(seconds),
            }
            if timed[0]["resident_bytes"]:
                row["resident"] = statistics.median(process["resident_bytes"] for process in timed)
        if silent := measured.get("silent"):
            row["exposed"] = row["seconds"] - statistics.median(process["seconds"] for process in silent)
            row["sent"] = silent[0]["bytes"]
        if "peak" in row and "seconds" in row:
            flops = row["tokens_per_s"] * found["flops_per_token"]
            if rates := [limit["flops"][found["product_dtype"]] for limit in part["limits"]]:
                row["mfu"] = flops / statistics.median(rates)
            if results["machine"]["datasheet_flops"]:
                row["datasheet_mfu"] = flops / results["machine"]["datasheet_flops"]
        rows.append(row)
    return rows


def changed(before, after):
    """How many times as long `before` takes as `after`, or that the difference is within the range of the repeats.

    If nothing changed and the noise is normal, this claims a change by chance in 6 % of cases with three repeats
    each, in 0.4 % with five.
    """
    if before is after or min(before.get("repeats", 0), after.get("repeats", 0)) < 2:
        return ""
    if abs(before["seconds"] - after["seconds"]) <= max(before["range"], after["range"]):
        return UNCHANGED
    return f"{before['seconds'] / after['seconds']:.2f}×"


def table(results, mode):
    """The measurements of a mode in Markdown, below the conditions they were made under."""
    on = results["machine"]
    rows = summarize(results, mode)
    device = on["gpu"] or f"{on['cpu']}, {on['threads']} threads" + ", native bfloat16" * on["native_bfloat16"]
    repeats = max(row.get("repeats", 0) for row in rows)
    text = [
        f"## {mode}: `{' '.join(results['config'])}`",
        f"{device}; torch {on['torch']}; medians of {repeats} processes of {results['steps']} steps or more each.",
        markdown(columns(rows, mode), rows),
    ]
    if mode == "sweep" and (found := knee(rows)):
        text.append(found)
    if rows := [row for row in rows if "shares" in row]:
        shares = {label: lambda row, kind=kind: f"{row['shares'][kind]:.1%}" for kind, (label, _) in KINDS.items()}
        text += ["Where a step's time goes:", markdown(shares, rows)]
        text += ["What the memory of a step is (GB, and bytes per parameter):", markdown(memory_columns(rows), rows)]
    if limits := results["modes"][mode]["limits"]:
        rates = [
            f"{name} {statistics.median(limit['flops'][name] for limit in limits) / 1e12:.3g} TFLOP/s"
            for name in limits[0]["flops"]
        ]
        copy = statistics.median(limit["copy_bytes"] for limit in limits)
        text.append(f"The machine itself: a large matrix product {', '.join(rates)}; a copy {copy / 1e9:.3g} GB/s.")
    return "\n\n".join(text)


def columns(rows, mode):
    """{heading: row -> text} of the main table."""
    first = rows[0]
    before = {row["name"]: previous for previous, row in zip([first, *rows], rows, strict=False)}
    relative = {
        "ladder": {
            "against the one before": lambda row: changed(before[row["name"]], row),
            "against naive": lambda row: changed(first, row),
            "memory against naive": lambda row: f"{first['peak'] / row['peak']:.2f}× less",
        },
        "each": {
            "time": lambda row: f"{row['seconds'] / first['seconds']:.0%}",
            "speed": lambda row: changed(first, row),
            "memory": lambda row: f"{row['peak'] / first['peak']:.0%}",
        },
        "without": {
            "time it saves": lambda row: changed(row, first),
            "memory it saves": lambda row: f"{row['peak'] / first['peak']:.2f}×",
        },
        "sweep": {
            "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
            "against whole": lambda row: changed(rows[-1], row),
        },
        "scaling": {
            "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
            "efficiency": lambda row: f"{row['tokens_per_s'] / int(row['name']) / first['tokens_per_s']:.0%}",
            "communication not hidden, ms": lambda row: f"{1e3 * row['exposed']:.1f}",
            "MB reduced by each": lambda row: f"{row['sent'] / 1e6:.1f}",
        },
    }
    return {
        "ms/step": lambda row: f"{row['seconds'] * 1e3:.{0 if row['seconds'] > 0.1 else 1}f}",
        "IQR": lambda row: f"{row['iqr'] * 1e3:.{0 if row['seconds'] > 0.1 else 1}f}",
        **relative[mode],
        "of the matmul rate": lambda row: f"{row['mfu']:.0%}",
        "of the datasheet's": lambda row: f"{row['datasheet_mfu']:.0%}",
        "tensors GB": lambda row: f"{row['peak'] / 1e9:.3f}",
        "resident GB": lambda row: f"{row['resident'] / 1e9:.2f}" if "reserved" not in row.get("memory", {}) else "",
        "reserved GB": lambda row: f"{row['memory']['reserved'] / 1e9:.3f}",
        "context GB": lambda row: f"{row['memory']['context'] / 1e9:.3f}",
        "first step s": lambda row: f"{row['first']:.1f}",
        "losses": losses,
    }


def losses(row):
    if row["gap"] == 0:
        return "bit-equal"
    return f"within {row['gap']:.0e}" if row["gap"] <= SAME else f"WRONG by {row['gap']:.2g}"


def memory_columns(rows):
    def gigabytes(part):
        return lambda row: f"{row['memory'][part] / 1e9:.3f} ({row['memory'][part] / row['parameters']:.3g})"

    parts = {part: gigabytes(part) for part in ("weights", "gradients", "optimizer", "activations", "peak")}
    return parts | {
        "predicted": lambda row: f"{row['predicted'] / 1e9:.3f}",
        "error": lambda row: f"{row['predicted'] / row['peak'] - 1:+.1%}",
    }


def markdown(columns, rows):
    """A table whose source reads well too. A cell that lacks its measurement is empty, an empty column left out."""

    def cell(text, row):
        try:
            return text(row)
        except (KeyError, TypeError):
            return ""

    lines = {row["name"]: {heading: cell(text, row) for heading, text in columns.items()} for row in rows}
    kept = [heading for heading in columns if any(line[heading] for line in lines.values())] or list(columns)[:1]
    body = [["", *kept]]
    for row in rows:
        cells = [lines[row["name"]][heading] for heading in kept]
        if row["note"]:
            cells[0] = row["note"].replace("|", "/")
        body.append([row["name"], *cells])
    notes = {row["note"] for row in rows}
    widths = [max(len(line[i]) for line in body if line[i] not in notes) for i in range(len(body[0]))]
    body.insert(1, ["-" * max(3, width) for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in body)


def knee(rows):
    """Where larger micro-batches stop paying, and whether the whole batch at once is the fastest."""
    measured = [row for row in rows if "tokens_per_s" in row]
    if not measured:
        return ""
    best = max(measured, key=lambda row: row["tokens_per_s"])
    found = next(row for row in measured if row["tokens_per_s"] >= KNEE * best["tokens_per_s"])
    text = f"The knee is at {found['name']}: the smallest micro-batch with {KNEE:.0%} of the best throughput"
    whole = measured[-1]
    if changed(whole, best).endswith("×"):
        text += f"; {best['name']} beats {whole['name']}, {changed(whole, best)} as fast"
    return f"{text}, and {found['peak'] / whole['peak']:.0%} of the memory of {whole['name']}."


def draw(results, mode, path):
    """Time and memory of each row, side by side, in what they consist of; of a sweep, as curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if rows := [row for row in summarize(results, mode) if "seconds" in row and ("peak" in row or mode == "scaling")]:
        figure = {"sweep": curves, "scaling": efficiency}.get(mode, bars)(plt, rows)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def bars(plt, rows):
    names = [row["name"] for row in rows]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 1.5 + 0.36 * len(rows)), sharey=True, layout="constrained", width_ratios=[3, 2]
    )
    times = {kind: [1e3 * row["seconds"] * row["shares"][kind] for row in rows] for kind in KINDS}
    faster = [f"{1e3 * row['seconds']:.4g} ms, {rows[0]['seconds'] / row['seconds']:.2g}×" for row in rows]
    stack(left, names, times, KINDS, faster)
    left.set(title=f"time of a step, ms, and speed against {names[0]}")
    sizes = {part: [row["memory"][part] / 1e9 for row in rows] for part in PARTS}
    less = [f"{row['peak'] / 1e9:.3g} GB, {rows[0]['peak'] / row['peak']:.2g}×" for row in rows]
    stack(right, names, sizes, PARTS, less)
    right.set(title="peak memory of all tensors, GB, and times less")
    left.invert_yaxis()
    return figure


def stack(axis, names, values, styles, labels):
    """Horizontal bars, each of several parts, with a label at their ends."""
    start = [0.0] * len(names)
    for part, (label, color) in styles.items():
        drawn = axis.barh(names, values[part], left=start, color=color, label=label, height=0.7)
        start = [total + value for total, value in zip(start, values[part], strict=True)]
    axis.bar_label(drawn, labels, padding=4)
    axis.set_xlim(0, 1.3 * max(start))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=4, frameon=False, fontsize="small")


def curves(plt, rows):
    names = [row["name"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(names, [row["tokens_per_s"] for row in rows], marker="o", color="tab:blue")
    left.axhline(KNEE * max(row["tokens_per_s"] for row in rows), color="tab:gray", linestyle=":", linewidth=1)
    left.set(title=f"tokens/s (dotted: {KNEE:.0%} of the best)", xlabel="micro-batches × sequences", ylim=(0, None))
    right.plot(names, [row["peak"] / 1e9 for row in rows], marker="o", color="tab:orange")
    right.set(title="peak memory of all tensors, GB", xlabel="micro-batches × sequences", ylim=(0, None))
    return figure


def efficiency(plt, rows):
    """Throughput over the number of processes, beside as many times that of one."""
    counts = [int(row["name"]) for row in rows]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    axis.plot(counts, [n * rows[0]["tokens_per_s"] / counts[0] for n in counts], "k:", linewidth=1, label="linear")
    axis.plot(counts, [row["tokens_per_s"] for row in rows], marker="o", label="measured")
    axis.set(title="tokens/s", xlabel="processes", xticks=counts, ylim=(0, None))
    axis.legend()
    return figure


def compare(a, b):
    """Two results side by side, machines, versions or commits: what differs in their conditions, then the rows."""
    text = []
    for key in ("machine", "config", "steps", "code"):
        if a[key] != b[key]:
            text += [f"A  {key}: {a[key]}", f"B  {key}: {b[key]}"]
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
        columns[f"{side} ms/step"] = lambda pair, side=side: f"{1e3 * pair[side]['seconds']:.1f}"
    columns["speed of B against A"] = lambda pair: changed(pair["A"], pair["B"])
    for side in "AB":
        columns[f"{side} against {first['name']}"] = lambda pair, side=side: changed(first[side], pair[side])
    for side in "AB":
        columns[f"{side} tensors GB"] = lambda pair, side=side: f"{pair[side]['peak'] / 1e9:.3f}"
    return markdown(columns, pairs)
