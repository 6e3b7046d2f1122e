"""The summary of lab/gpu.sh: what its parts measured, as profile.py prints it, and what of it is wrong."""

import json
import re

from lab import tables, tuned
from lab.peers import mode as peers
from lab.results import read_results
from lab.summary import summarize

LEGITIMATE = ("not applicable", "out of memory", "needs ", "no kernel")  # notes of rows that are no fault


def summary(parts, folder, state):
    """The lines of all parts, and those that say what is wrong.

    parts: lab/gpu.py's, with their results in the folder. state: {part: its state} of those that had their turn.
    """
    lines, wrong = [], []
    for part in parts:
        now = state.get(part.name, {"status": "not started"})
        try:
            found, failed = lines_of(part, folder)
        except (OSError, ValueError, IndexError, StopIteration):  # no results yet
            found, failed = [], []
        lines += [f"{part.name}: {status(now)}", *(f"  {line}" for line in found if line)]
        wrong += [f"{part.name}, {fault}" for fault in failed]
        if now["status"] == "failed":
            wrong.append(f"{part.name}: {now['reason']}")
    return [*lines, *(f"WRONG: {fault}" for fault in wrong), *([] if wrong else ["nothing is wrong"])], wrong


def status(state):
    """The state of a part in words."""
    match state["status"]:
        case "skipped" | "failed":
            return f"{state['status']}: {state['reason']}"
        case "out of time":
            return f"out of time after {state['seconds']} s; the same command continues"
        case "done":
            return f"done in {state['seconds']} s"
    return state["status"]


def lines_of(part, folder):
    """The lines that a part's results are worth so far, and the faults among them."""
    own = folder / part.name
    if part.program == "pytest":
        log = (folder / "tests.log").read_text().rpartition("test session starts")[2]  # of the last run
        counts = re.findall(r"^=* ?(.* in [\d.]+\w*).*$", log, re.MULTILINE)
        return counts[-1:], [f"{name} failed" for name in re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)]
    if part.program == "train.py":
        rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
        last = {key: value for row in rows for key, value in row.items()}
        named = {"train_loss": "train", "val_loss": "val", "step_ms": "ms/step", "mfu": "mfu"}
        figures = [f"{name} {last[key]:.4g}" for key, name in named.items() if key in last]
        return [", ".join([f"step {last['step']}", *figures])], []
    if part.mode == "tune":
        races = json.loads((own / "tune.json").read_text())["races"]
        return [f"{tuned.name(race)}: {tuned.outcome(race)}" for race in races if race["outcome"]], []
    if part.mode == "peers":
        results = json.loads((own / "peers.json").read_text())
        return peers.brief(results).splitlines(), faults(peers.summarize(results))
    if not (own / "results.json").exists():
        return [], []
    results = read_results(own / "results.json")
    mode = next(name for name in results["modes"] if name.startswith(part.mode))  # or vary-attention
    limits, on = results["modes"][mode]["limits"], results["machine"]
    rates = [tables.machine_limits(limits, on["native_bfloat16"])] if limits else []
    head = [f"{tables.device(results)}; torch {on['torch']}, CUDA {on.get('cuda')}", *rates]
    return [*head, *tables.brief(results, mode).splitlines()], faults(summarize(results, mode))


def faults(rows):
    """The rows whose losses are another model's, and those that failed, other than for a reason of the machine's."""
    wrong = [f"{row['name']}: {tables.cell(tables.losses, row)}" for row in rows if tables.is_wrong(row)]
    notes = {row["name"]: row["note"] for row in rows if row["note"]}
    failed = {name: note for name, note in notes.items() if not any(reason in note for reason in LEGITIMATE)}
    return [*wrong, *(f"{name}: {note}" for name, note in failed.items())]
