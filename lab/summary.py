"""The rows of a mode: medians over the processes that results.json holds, and what follows from them."""

import math
import statistics

UNCHANGED = "no measurable change"
BEYOND = 2  # learning rates that are tried beyond the ends of a grid


def summarize(results, mode):
    """A dict a row, in the order measured; what is not measured (yet) is absent. Bytes, seconds, nats, FLOP/s."""
    part = results["modes"][mode]
    examined = [measured["examine"][0] for measured in part["rows"].values() if measured.get("examine")]
    rows = []
    for name, measured in part["rows"].items():
        row = {"name": name, "note": measured["note"]}
        if timed := measured.get("time"):
            row |= timing(timed)
        if silent := measured.get("silent"):
            row["exposed"] = row["seconds"] - statistics.median(process["seconds"] for process in silent)
            row["gradient_bytes"] = silent[0]["bytes"]
        if found := (measured.get("examine") or [None])[0]:
            gaps = [abs(ours - theirs) for ours, theirs in zip(found["losses"], examined[0]["losses"], strict=True)]
            row |= {
                "loss": found["losses"][-1],
                "memory": found["memory"],
                "peak": found["memory"]["peak"],
                "parameters": found["parameters"],
                "shares": shares(found, row, results["machine"]["gpu"]),
                "dropout": results["keys"]["dropout"],
            }
            chosen = any(word.startswith("--optimizer=") for word in measured["words"])
            configured = not measured["words"] and results["keys"].get("optimizer", "adamw") != "adamw"
            row["another update"] = chosen or configured
            if found is not examined[0]:
                row["gap"] = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
            if "predicted" in found:
                row["predicted"] = found["predicted"]
            if timed:
                flops = row["tokens_per_s"] * found["flops_per_token"]
                dtype = found["product_dtype"]
                if rates := [limit["flops"][dtype] for limit in part["limits"] if dtype in limit["flops"]]:
                    row["mfu"] = flops / statistics.median(rates)
                if results["machine"]["datasheet_flops"] and dtype in ("bfloat16", "float16"):
                    row["datasheet_mfu"] = flops / results["machine"]["datasheet_flops"]
        if trained := measured.get("curve"):
            losses = [curve["val_loss"] for curve in trained]
            row |= ranking(dict(sorted(zip(factors(part["grid"], losses), trained, strict=False))))
        rows.append(row)
    return rows


def ranking(curves):
    """Of {times the optimizer's own learning rate: its curve} the best, if one has not diverged."""
    losses = {factor: curve["val_loss"] for factor, curve in curves.items() if curve["val_loss"] is not None}
    if not losses:
        return {"curves": curves}
    best = min(losses, key=losses.get)
    return {"curves": curves, "best": best, "val_loss": losses[best], "edge": best in (min(curves), max(curves))}


def factors(grid, losses):
    """What the learning rate is multiplied by in each run and, if there is one, in the next.

    The grid comes first; then, while the best loss is at an end, a further step beyond it, BEYOND times at most.
    losses: of the runs that have ended; None where one diverged.
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


def timing(processes):
    """Median and spread of the processes that timed a row."""
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


def shares(found, row, gpu):
    """Shares of a step's time by KINDS: of the profiled step on a CPU; on a GPU its kernels' of the usual step."""
    step = row.get("seconds", found["profiled_seconds"]) if gpu else found["profiled_seconds"]
    parts = {kind: seconds / step for kind, seconds in found["seconds_by_kind"].items()}
    waited = parts.pop("data")
    idle = max(0.0, 1 - sum(parts.values()))  # no kernel runs, or no operator
    parts["data"] = min(waited, idle)
    return parts | {"host": idle - parts["data"]}


def gain(before, after):
    """How many times as fast `after` is as `before`: the median over the rounds, and their range.

    Only what was measured in the same round is divided: a drift of the machine from round to round cancels out. A
    median that is no further from 1 than the range is wide is no measurable change.
    """
    pairs = list(zip(before.get("rounds", []), after.get("rounds", []), strict=False))
    if before is after or len(pairs) < 2:
        return ""
    ratios = [ours / theirs for ours, theirs in pairs]
    if abs(statistics.median(ratios) - 1) <= max(ratios) - min(ratios):
        return UNCHANGED
    return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"
