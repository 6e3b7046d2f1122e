"""Summarizes the rows of a mode: medians over the processes that measured them, and figures derived from them."""

import itertools
import math
import statistics
from collections.abc import Iterable

from lab.measure.stats import LEAST, LEVEL, LOOKED, intervals
from lab.measure.turns import differences, turns_of
from nanoladder.config import stage_names, stage_path


def summarize(results: dict, mode: str) -> list[dict]:
    """A dict for each row of a mode, in the order of measurement: its name, a note if it failed, and its figures.

    Only measured figures are present, in seconds, bytes, nats, FLOP/s. seconds: of a step, the median of the rounds.
    first: of the first process's first step, which may compile; later: the median of the later processes' first steps.
    resident: peak resident memory above the start's. memory: by part (breakdown.py). peak: of the bytes of all tensors.
    gap: largest difference of a loss from the first row's. shares: of a step's time, by kind of work. limit: the least
    seconds of a step on this machine (roofline.py), by bound in limit_bounds. gains: {other row: Interval} of the
    logarithm of how many times as fast this row is. val_loss: of a training run, which has a learning_rate, unless it
    diverged. For several processes also their number, the bytes sent by a process, and the predicted bubble of a
    pipeline. For a peer, its setting as text.
    """
    part, machine = results["modes"][mode], results["machine"]
    rows, first = [], None
    for name, measured in part["rows"].items():
        row = {"name": name, "note": measured["note"], "dropout": results["keys"]["dropout"]}
        row["another_update"] = measured.get("another_update", False)
        rows.append(row)
        timed, figures = measured.get("time"), {}
        for kind in ("profile", "exchange", "curve", *(["time"] if mode == "peers" else [])):
            figures |= (measured.get(kind) or [{}])[0]
        row |= {key: figure for key, figure in figures.items() if figure}
        if timed:
            compiled = measured.get("profile", [{}])[0].get("first_step_seconds")
            row |= timing(timed, machine["gpu"], compiled)
        if "sent" in figures:
            row |= {"processes": int(name), "sent": ring_bytes(figures["sent"], int(name))}
        if "losses" in figures:
            first = first or figures
            row |= {"loss": figures["losses"][-1]} | gap(figures, first)
        if "memory" in figures:
            row |= {"peak": figures["memory"]["peak"], "shares": shares(figures, row, machine["gpu"])}
        if timed and "memory" in figures:
            row |= utilization(figures, row["tokens_per_s"], part["limits"], machine["datasheet_flops"])
        predicted = (measured.get("predicted") or [{}])[0]
        row |= {"predicted": predicted["memory"]} if "memory" in predicted else {}
        if timed and (bounds := predicted.get("bounds")):
            row |= {"limit": sum(bounds.values()), "limit_bounds": bounds}
    add_gains(rows, mode)
    return rows


def add_gains(rows, mode):
    """Adds to each row that was timed in LEAST rounds its gains over the first row and, in a ladder, the row below.

    Ratios are taken within a turn, so that a drift of the machine cancels out.
    """
    timed = {row["name"]: row for row in rows if len(row.get("rounds", ())) >= LEAST}
    seconds = {name: row["rounds"] for name, row in timed.items()}
    changes = {(name, other): differences(seconds[other], seconds[name]) for name, other in pairs(timed, mode)}
    changes = {pair: each for pair, each in changes.items() if len(each) >= LEAST}
    looked = any(row["turns"] for row in timed.values())
    for (name, other), interval in intervals(changes, LOOKED if looked else LEVEL).items():
        timed[name].setdefault("gains", {})[other] = interval


def pairs(names, mode):
    """[(row, a row that it is compared with)]: the first of these names and, in a ladder, the row below."""
    others = {name: [next(iter(names)), *([row_below(name, names)] if mode == "ladder" else [])] for name in names}
    return [(name, other) for name in names for other in dict.fromkeys(others[name]) if other not in (None, name)]


def row_below(name: str, names: Iterable[str]) -> str | None:
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


def timing(processes, gpu, first=None):
    """Figures from the processes that timed a row. Resident memory is not that of a GPU.

    first: seconds of the first step, if another process took it before them.
    """
    seconds = [process["seconds"] for process in processes]
    later = [process["first_step_seconds"] for process in processes]
    first = first or later.pop(0)
    row = {
        "seconds": statistics.median(seconds),
        "rounds": {process.get("round", n): turns_of(process) for n, process in enumerate(processes)},
        "turns": sum(len(process.get("turns", ())) for process in processes),
        "first": first,
        "tokens_per_s": processes[0]["tokens"] / statistics.median(seconds),
    }
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        row |= {"iqr": high - low, "later": statistics.median(later)}
    if processes[0]["resident_bytes"] and not gpu:
        row["resident"] = statistics.median(process["resident_bytes"] for process in processes)
    return row


def gap(profile, first):
    """Largest difference of a loss from the first row's; the first row itself has none."""
    gaps = [abs(a - b) for a, b in zip(profile["losses"], first["losses"], strict=True)]
    return {} if profile is first else {"gap": max(gaps) if all(map(math.isfinite, gaps)) else math.inf}


def utilization(profile, tokens_per_s, limits, datasheet_flops):
    """Shares of the FLOP/s that the machine reaches in a matrix product and of those in its datasheet, where known."""
    flops, dtype = tokens_per_s * profile["flops_per_token"], profile["product_dtype"]
    figures = {}
    if rates := [limit["flops"][dtype] for limit in limits if dtype in limit["flops"]]:
        figures["mfu"] = flops / statistics.median(rates)
    if datasheet_flops and dtype in ("bfloat16", "float16"):
        figures["datasheet_mfu"] = flops / datasheet_flops
    return figures


def shares(profile, row, gpu):
    """{kind: share of a step's time}: on a CPU of the profiled step, on a GPU its kernels' of the usual step."""
    step = row["seconds"] if gpu and "seconds" in row else profile["profiled_seconds"]
    parts = {kind: seconds / step for kind, seconds in profile["seconds_by_kind"].items()}
    waited = parts.pop("data")
    idle = max(0.0, 1 - sum(parts.values()))  # no kernel runs, or no operator
    parts["data"] = min(waited, idle)
    return parts | {"host": idle - parts["data"]}
