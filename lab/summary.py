"""The rows of a mode as figures: medians over the processes in results.json, and what follows from them."""

import itertools
import math
import statistics

from nanoladder.config import stage_names, stage_path

FIGURES = {  # every figure that a row can have; bytes, seconds, nats, FLOP/s
    "seconds": "of a step: the median of the rounds",
    "rounds": "seconds of a step in each round",
    "iqr": "interquartile range of the rounds, in seconds",
    "first": "seconds of the first process's first step, which may compile",
    "later": "seconds of the later processes' first steps: the median",
    "tokens_per_s": "throughput",
    "resident": "peak resident memory above the start's: the median",
    "exposed": "seconds of a step that go into communication and are not hidden by computation",
    "sent": "bytes that a process sends in a step, if messages go around a ring",
    "beyond": "seconds of a step beyond a process's share of the work, at the speed of one process alone",
    "bubble": "share of a step in which a process of a pipeline waits, by a formula",
    "gradient_bytes": "bytes of gradients that a process averages in a step",
    "loss": "of the last examined step",
    "gap": "largest difference of a loss from the first row's",
    "memory": "a step's memory by part (anatomy.py)",
    **dict.fromkeys(["weights", "gradients", "optimizer", "activations", "rest"], "part of memory"),
    **dict.fromkeys(["reserved", "context"], "part of memory, on a GPU"),
    "peak": "of the bytes of all tensors; part of memory too",
    "predicted": "the predicted peak",
    "attention_kernel": "the kernel of attention, in words",
    "parameters": "number of them",
    "shares": "share of a step's time by kind",
    "dropout": "the config's",
    "another_update": "true if the row has an optimizer of its own, and so other losses",
    "mfu": "share of the measured rate of a matrix product",
    "datasheet_mfu": "share of the datasheet's rate",
    "limit": "least seconds of a step on this machine (roofline.py)",
    "limit_kinds": "its parts by kind of work",
    "limit_bounds": "its parts by bound: compute, memory, launches",
    "curves": "{multiple of the optimizer's learning rate: its training run}",
    "best": "the multiple with the lowest validation loss",
    "val_loss": "its validation loss",
    "edge": "true if it is the lowest or the highest that was tried",
    **dict.fromkeys(["temporary", "block"], "part of a predicted memory (trace.Memory)"),
    "formula": "bytes of a block's activations, by a formula (Korthikanti et al. 2022)",
    "fits": "the largest micro-batch that fits a memory",
    "longest": "the longest context that fits it",
    "time": "a predicted step's (roofline.Time)",
    "hours": "of the whole run, at that time",
}
UNCHANGED = "no measurable change"
BEYOND = 2  # learning rates that are tried beyond the ends of a grid


class NotMeasured(Exception):
    """A figure that a row could have and does not."""


class Row(dict):
    """Figures by name. One that was not measured raises NotMeasured; a name that is none of FIGURES, KeyError."""

    def __missing__(self, name):
        raise NotMeasured(name) if name in FIGURES else KeyError(name)


def summarize(results, mode):
    """A Row for each row of a mode, in the order of measurement, with its name and the note if it failed."""
    part = results["modes"][mode]
    examined = [measured["examine"][0] for measured in part["rows"].values() if measured.get("examine")]
    rows = []
    for name, measured in part["rows"].items():
        row = Row(name=name, note=measured["note"])
        if timed := measured.get("time"):
            row |= timing(timed)
        if silent := measured.get("silent"):
            row["exposed"] = row["seconds"] - statistics.median(process["seconds"] for process in silent)
            row["gradient_bytes"] = silent[0]["bytes"]
        if exchanged := measured.get("exchange"):
            n = int(name)
            row |= {"peak": exchanged[0]["peak"], "sent": ring_bytes(exchanged[0]["sent"], n)}
            row |= {key: exchanged[0][key] for key in ("predicted", "bubble") if exchanged[0].get(key)}
        if mode.startswith("scaling-") and timed and rows and "seconds" in rows[0]:
            own_tokens = row["tokens_per_s"] * row["seconds"] / int(name)
            row["beyond"] = row["seconds"] - own_tokens / rows[0]["tokens_per_s"]
        if found := (measured.get("examine") or [None])[0]:
            row |= examination(found, examined[0], row, results["machine"]["gpu"])
            row["dropout"] = results["keys"]["dropout"]
            row["another_update"] = has_own_optimizer(measured["words"], results["keys"])
            if timed:
                row |= utilization(found, row["tokens_per_s"], part["limits"], results["machine"]["datasheet_flops"])
        if timed and (limit := measured.get("limit")):
            row |= {"limit": sum(limit["kinds"].values()), "limit_kinds": limit["kinds"]}
            row["limit_bounds"] = limit["bounds"]
        if trained := measured.get("curve"):
            losses = [curve["val_loss"] for curve in trained]
            row |= ranking(dict(sorted(zip(factors(part["grid"], losses), trained, strict=False))))
        rows.append(row)
    return rows


def row_below(name, names):
    """The one of some rows of --mode=ladder, by name, that a row is compared with; None if there is none.

    For a stage it is the nearest that it stands on; for the config as it is, the last before it.
    """
    before = list(itertools.takewhile(lambda other: other != name, names))
    path = stage_path(name) if name in stage_names() else before
    return next((other for other in reversed(path) if other in before), None)


def ring_bytes(sent, n):
    """Bytes that a process sends of {kind: [number, bytes]} among n processes in a ring."""
    share = {"all_reduce": 2 * (n - 1) / n, "send": 1, "broadcast": 1}
    return sum(share.get(kind, (n - 1) / n) * size for kind, (_, size) in sent.items())


def timing(processes):
    """Figures from the processes that timed a row."""
    seconds = [process["seconds"] for process in processes]
    first, *later = [process["first_step_seconds"] for process in processes]
    row = {
        "seconds": statistics.median(seconds),
        "rounds": seconds,
        "first": first,
        "tokens_per_s": processes[0]["tokens"] / statistics.median(seconds),
    }
    if later:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        row |= {"iqr": high - low, "later": statistics.median(later)}
    if processes[0]["resident_bytes"]:
        row["resident"] = statistics.median(process["resident_bytes"] for process in processes)
    return row


def examination(found, first, row, gpu):
    """Figures from the process that examined a row; `first` is what was found of the first row."""
    figures = {
        "loss": found["losses"][-1],
        "memory": Row(found["memory"]),
        "peak": found["memory"]["peak"],
        "parameters": found["parameters"],
        "shares": shares(found, row, gpu),
    }
    if found is not first:
        gaps = [abs(a - b) for a, b in zip(found["losses"], first["losses"], strict=True)]
        figures["gap"] = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
    figures |= {name: found[name] for name in ("predicted", "attention_kernel") if name in found}
    return figures


def has_own_optimizer(words, keys):
    """True if a row's words choose its optimizer, or if it is the config as it is, with another one than AdamW."""
    chosen = any(word.startswith("--optimizer=") for word in words)
    return chosen or (not words and keys.get("optimizer", "adamw") != "adamw")


def utilization(found, tokens_per_s, limits, datasheet_flops):
    """Shares of the FLOP/s that the machine reaches in a matrix product and of those in its datasheet, where known."""
    flops, dtype = tokens_per_s * found["flops_per_token"], found["product_dtype"]
    figures = {}
    if rates := [limit["flops"][dtype] for limit in limits if dtype in limit["flops"]]:
        figures["mfu"] = flops / statistics.median(rates)
    if datasheet_flops and dtype in ("bfloat16", "float16"):
        figures["datasheet_mfu"] = flops / datasheet_flops
    return figures


def shares(found, row, gpu):
    """{kind: share of a step's time}: on a CPU of the profiled step, on a GPU its kernels' of the usual step."""
    step = row["seconds"] if gpu and "seconds" in row else found["profiled_seconds"]
    parts = {kind: seconds / step for kind, seconds in found["seconds_by_kind"].items()}
    waited = parts.pop("data")
    idle = max(0.0, 1 - sum(parts.values()))  # no kernel runs, or no operator
    parts["data"] = min(waited, idle)
    return parts | {"host": idle - parts["data"]}


def ranking(curves):
    """The best of {multiple of the optimizer's learning rate: its training run}, if one has not diverged."""
    losses = {factor: curve["val_loss"] for factor, curve in curves.items() if curve["val_loss"] is not None}
    if not losses:
        return {"curves": curves}
    best = min(losses, key=losses.get)
    return {"curves": curves, "best": best, "val_loss": losses[best], "edge": best in (min(curves), max(curves))}


def factors(grid, losses):
    """The multiples of the learning rate of all runs so far and, if there is one, of the next.

    The grid comes first. Then, as long as the best loss is at an end, one step beyond that end, BEYOND steps at most.
    losses: validation losses of the finished runs; None for one that diverged.
    """
    tried = list(grid)
    while len(grid) > 1 and len(tried) <= len(losses) and len(tried) < len(grid) + BEYOND:
        _, best = min(zip((math.inf if loss is None else loss for loss in losses), tried, strict=False))
        lowest, second, *_ = ascending = sorted(tried)
        if best not in (lowest, ascending[-1]):
            break
        further = best * best / (second if best == lowest else ascending[-2])
        tried.append(float(f"{further:.3g}"))  # as it is printed
    return tried


def speedup(before, after):
    """The text of how many times as fast `after` is as `before`: the median over the rounds, and their range.

    Ratios are taken within a round, so that a drift of the machine from round to round cancels out. A median that is no
    further from 1 than the range is wide is no measurable change.
    """
    pairs = list(zip(before["rounds"], after["rounds"], strict=False))
    if before is after or len(pairs) < 2:
        return ""
    ratios = [a / b for a, b in pairs]
    if abs(statistics.median(ratios) - 1) <= max(ratios) - min(ratios):
        return UNCHANGED
    return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"
