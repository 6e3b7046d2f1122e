"""The summary of lab/gpu.sh: at most seventy lines on what its parts found, and what of it is wrong."""

import json
import math
import re

from lab import tables, tuned
from lab.peers import mode as peers
from lab.results import read_results
from lab.summary import summarize

LONGEST = 70  # lines
LEGITIMATE = ("not applicable", "out of memory", "needs torchao", "no kernel")  # notes of rows that are no fault
LEGITIMATE += (peers.INSTALL, "needs a checkout")
OUTCOMES = {"kept": "kept", "slower": "slower", "no gain": "without a gain", "failed": "failed", None: "open"}
BEST = 3  # optimizers, or changes of --mode=tune, that are named


def summary(parts, folder, state):
    """The lines of all parts, and those that say what is wrong.

    parts: lab/gpu.py's, with their results in the folder. state: {part: its state} of those that had their turn.
    """
    lines, wrong = [], []
    for part in parts:
        found, faults = lines_of(part, folder)
        now = state.get(part.name, {"status": "not started"})
        if now["status"] == "failed":
            faults.append(f"{part.name}: {now['reason']}")
        lines += [f"{part.name}: {status(now)}", *(f"  {line}" for line in found)]
        wrong += faults
    verdict = [f"WRONG: {fault}" for fault in wrong] or ["nothing is wrong"]
    verdict = verdict[:10] + [f"… and {len(verdict) - 10} more"] * (len(verdict) > 10)
    return [line[:120] for line in [*lines[: LONGEST - len(verdict)], *verdict]], wrong


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
    try:
        match part.program:
            case "pytest":
                return tests((folder / "tests.log").read_text())
            case "train.py":
                return training((folder / part.name / "metrics.jsonl").read_text()), []
        if part.mode == "tune":
            return tune(json.loads((folder / part.name / "tune.json").read_text())), []
        if part.mode == "peers":
            return ladder(part, peers.summarize(json.loads((folder / part.name / "peers.json").read_text())))
        path = folder / part.name / "results.json"
        results = read_results(path) if path.exists() else None
    except (OSError, ValueError, IndexError):  # no results yet
        return [], []
    modes = [name for name in results["modes"] if name.startswith(part.mode)] if results else []  # or vary-attention
    if not modes:
        return [], []
    rows = summarize(results, modes[0])
    lines, faults = optimizers(rows) if part.mode == "optimizers" else ladder(part, rows)
    return machine(results, modes[0]) * (part.mode == "ladder") + lines, faults


def machine(results, mode):
    """The machine with its versions, and the limits that were measured beside a mode's rows."""
    on, limits = results["machine"], results["modes"][mode]["limits"]
    versions = f"torch {on['torch']}, CUDA {on.get('cuda')}, cuDNN {on.get('cudnn')}, Python {on.get('python')}"
    rates = [tables.machine_limits(limits, on["native_bfloat16"])] * bool(limits)
    return [f"{tables.device(results)}; {versions}", *rates]


def tests(log):
    log = log.rpartition("test session starts")[2]  # of the last run
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    counts = re.findall(r"^.*\b(?:passed|failed|skipped|error).* in [\d.]+.*$", log, re.MULTILINE)
    return [line.strip("= ") for line in counts[-1:]], [f"{name} failed" for name in failed]


def training(metrics):
    """The last step of a run, and its last validation loss."""
    rows = [json.loads(line) for line in metrics.splitlines()]
    last = {key: value for row in rows for key, value in row.items()}
    texts = {"train_loss": "train {:.4f}", "val_loss": "val {:.4f}", "step_ms": "{:.2f} ms/step", "mfu": "mfu {:.1%}"}
    return [
        ", ".join([f"step {last['step']}", *(text.format(last[key]) for key, text in texts.items() if key in last)])
    ]


def tune(results):
    """What was tried, and the tuned loop beside the finished one. A change that fails is no fault of the loop."""
    by = {outcome: [race for race in results["races"] if race["outcome"] == outcome] for outcome in OUTCOMES}
    lines = [", ".join(f"{len(races)} {OUTCOMES[outcome]}" for outcome, races in by.items())]
    lines += [f"kept {tuned.name(race)}: {tuned.speed(race)}" for race in by["kept"][:BEST]]
    lines += [f"failed {tuned.name(race)}: {race['note']}" for race in by["failed"][:BEST]]
    for race in results["confirmations"][-1:]:
        lines += [tuned.comparison(race), tuned.verdict({}, race)["text"]]
    return [line for line in lines if line]


def ladder(part, rows):
    """A line for each row that was measured; other optimizers than naive's have other losses."""
    lines, faults = [], []
    width = max(21, *(len(row["name"]) for row in rows))
    for row in rows:
        note = row["note"] or ""
        if note.startswith("not applicable"):
            continue
        if note and not any(reason in note for reason in LEGITIMATE):
            faults.append(f"{part.name}, {row['name']}: {note}")
        wrong_loss = "gap" in row and not row["another_update"] and not row["gap"] <= tables.SAME
        if wrong_loss and not row["dropout"]:
            faults.append(f"{part.name}, {row['name']}: losses {row['gap']:.2g} from {rows[0]['name']}'s")
        lines.append(f"{row['name']:<{width}}{note or '  '.join(cells(row, rows[0]))}")
    return lines, faults


def cells(row, first):
    """The figures of a row that were measured, as text."""
    columns = (
        lambda row: f"{1e3 * row['seconds']:8.2f} ms {first['seconds'] / row['seconds']:5.2f}×",
        lambda row: f"{row['peak'] / 1e9:6.3f} GB {first['peak'] / row['peak']:5.2f}×",
        lambda row: f"predicted {row['predicted'] / row['peak'] - 1:+6.1%}",
        lambda row: f"kernels {1 - row['shares']['host'] - row['shares']['data']:4.0%}",
        lambda row: f"matmul {row['mfu']:4.0%}",
        lambda row: f"limit {row['limit'] / row['seconds']:4.0%}",
        tables.losses,
    )
    return filter(None, (tables.cell(text, row) for text in columns))


def optimizers(rows):
    """The best optimizers by validation loss. One that diverges or that a machine cannot run is no fault."""
    trained = sorted((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    texts = [f"{row['name']} {row['val_loss']:.4f}" for row in trained[:BEST] if math.isfinite(row["val_loss"])]
    return [f"{len(trained)} trained; the best: {', '.join(texts)}"] * bool(trained), []
