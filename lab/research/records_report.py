"""What records.py reads, as tables and pictures: records/*/README.md, records.png and records/tried.md."""

import math
import re
import statistics
import textwrap
from pathlib import Path

import numpy as np

from lab.measure import stats, tables
from lab.measure.results import ROOT, read
from lab.measure.runs import read as read_runs
from lab.research.records import (
    NAIVES,
    RECORDS,
    Entry,
    Race,
    ends,
    is_current,
    log_speedups,
    measured,
    races,
    verdict,
)
from nanoladder import files

RESULTS, TRIED = ROOT / "results", RECORDS / "tried.md"


def figures(entry: Entry, results: dict) -> dict[str, str]:
    """The texts of an entry's row on one machine."""
    runs, (naive, _, name), logs = results["runs"], ends(results), log_speedups(results)
    text, holds = verdict(results)
    seconds = stats.by_seed(runs, name, "seconds")
    if holds is not None and set(seconds) != set(entry.seeds(len(seconds))):
        text += ", on its author's seeds"
    minutes = {key: statistics.median(stats.by_seed(runs, key, "seconds").values()) / 60 for key in (name, naive)}
    loss = {key: statistics.fmean(stats.by_seed(runs, key, "bpb").values()) for key in (name, naive)}
    return {
        "minutes (naive)": f"{minutes[name]:.2f} ({minutes[naive]:.2f})",
        "speedup": stats.in_words({name: logs})[name],
        "tokens ×": f"{statistics.median(stats.paired(runs, naive, name, 'tokens', lambda a, b: a / b)):.1f}",
        "bits/byte (naive)": f"{loss[name]:.4f} ({loss[naive]:.4f})",
        "verdict": f"refused: {entry.refused}" if entry.refused else text,
    }


def beside(runs: dict) -> list[dict]:
    """The results of a machine, {Entry: results}, in which tokens were counted beside the naive loop; the last."""
    return [results for results in runs.values() if results["counted"]][-1:]


def speedup_of_counting(results: dict) -> float:
    """How much faster tokens were counted than the naive loop trained: its median time divided by theirs."""
    seconds = stats.by_seed(results["runs"], ends(results)[0], "seconds").values()
    return statistics.median(seconds) / results["counted"]["seconds"]


def figures_of_counting(results: dict) -> dict[str, str]:
    """The texts of the row of what was counted, beside the naive loop's runs of the same results."""
    counted, naive = results["counted"], ends(results)[0]
    of = {key: [*stats.by_seed(results["runs"], naive, key).values()] for key in ("seconds", "tokens", "bpb")}
    minutes = statistics.median(of["seconds"]) / 60
    return {
        "minutes (naive)": f"{counted['seconds'] / 60:.2f} ({minutes:.2f})",
        "speedup": f"{speedup_of_counting(results):.0f}×",
        "tokens ×": f"{statistics.median(of['tokens']) / counted['tokens']:.1f}",
        "bits/byte (naive)": f"{counted['bpb']:.4f} ({statistics.fmean(of['bpb']):.4f})",
        "verdict": f"{counted['name']}, {'no network' if results['target'] == NAIVES else 'the loss to reach'}",
    }


def rows_of(runs: dict) -> dict[str, dict[str, str]]:
    """The texts of a machine's rows, {name: {heading: text}}: counting, then entries. runs: {entry: results}."""
    rows = [("counting", figures_of_counting(results)) for results in beside(runs)]
    return dict(rows) | {entry.name: figures(entry, results) for entry, results in runs.items()}


def news(race: Race) -> dict:
    """{Entry: what it is, by whom, and when}. Results that are of other files are named there, and have no row."""
    texts = {}
    for entry in race.entries:
        texts[entry] = f"{entry.title} ({entry.by}, {entry.date})"
        for name in [name for name, results in entry.results().items() if not is_current(entry, results)]:
            texts[entry] += f"; its {name} is not of these files: no row, remove it and check again"
    return texts


def table(race: Race) -> str:
    """Lists the entries of a race, then a table of results for each machine, in Markdown."""
    parts = ["\n".join(f"- [{entry.name}]({entry.name}/README.md): {text}" for entry, text in news(race).items())]
    for machine, runs in measured(race).items():
        parts.append(f"{machine}:\n\n{tables.texts(rows_of(runs))}")
    return "\n\n".join(parts)


def on_terminal() -> str:
    """What the tables of all races have, for a terminal; each verdict below its table."""
    parts = []
    for race in races():
        parts.append(tables.wrapped(race.title))
        parts.append("\n".join(tables.wrapped(f"{entry.name}: {text}") for entry, text in news(race).items()))
        for machine, runs in measured(race).items():
            rows = rows_of(runs)
            verdicts = "\n".join(tables.wrapped(f"{name}: {row.pop('verdict')}") for name, row in rows.items())
            parts.append(f"{machine}\n\n{tables.texts(rows, tables.plain)}\n\n{verdicts}")
    return "\n\n".join(parts)


def write_pages() -> None:
    """Writes the tables and the picture of each race, and the list of trials, to records/."""
    for race in races():
        files.write(race.folder / "README.md", page(race))
        draw(race, race.folder / "records.png")
    files.write(TRIED, tried())


def page(race: Race) -> str:
    """Returns a race's README.md with the part between its <!-- records --> marks rewritten."""
    return re.sub(
        r"(<!-- records -->\n).*?(\n<!-- records -->)",
        lambda marks: f"{marks[1]}{table(race)}{marks[2]}",
        (race.folder / "README.md").read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


def tried() -> str:
    """Returns records/tried.md: trials that ended no better, of every tried.jsonl and recipe.json in results/."""
    text = "# Tried, and no better\n\nWritten by `python ladder.py docs` from the trials in results/.\n\n"
    text += "Each row is an unsuccessful trial, beside the most similar one that ended lower and, if times are known, "
    text += "no later: one run each, of the same preset and seed. *no KEY*: it lacks a key that the other one sets.\n\n"
    text += "| preset | change | bits/byte | the other's |\n| --- | --- | --- | --- |\n"
    for path in sorted(RESULTS.glob("*/*/tried.jsonl")):
        trials = [run.row | run.figures for run in read_runs(path, "tried")[1]]
        for trial in trials:
            better = [each for each in trials if is_better(each, trial)]
            if better:
                like = min(better, key=lambda each, trial=trial: (len(changes(trial, each)), each["val_bpb"]))
                figures = f"{trial['val_bpb']:.4f} | {like['val_bpb']:.4f}"
                text += f"| {trial['preset']} | {'; '.join(changes(trial, like))} | {figures} |\n"
    text += "\nRungs without a significant gain on fresh seeds, or that cost tokens "
    text += "([how](../docs/recipe.md#how-it-is-measured)):\n\n"
    text += "| rung | verdict | against the recipe before it, or without it | measured |\n| --- | --- | --- | --- |\n"
    for path in sorted(RESULTS.glob("*/*/recipe.json")):
        for row in read(path, ("rows",))["rows"]:
            gain = row.get("step") or row.get("without")
            if gain and row["verdict"].startswith(("not significant", "costs")):
                measured = "/".join(path.parts[-3:-1])
                text += f"| {row['name']} | {row['verdict']} | {tables.factor(gain)} × tokens | {measured} |\n"
    return text


def is_better(trial, other):
    """True if a trial ended lower than another of its preset and seed and, if that one's time is known, no later."""
    alike = all(trial[key] == other[key] for key in ("preset", "seed"))
    earlier = trial.get("seconds", math.inf) <= other.get("seconds", math.inf)
    return alike and earlier and trial["val_bpb"] < other["val_bpb"]


def changes(trial, other):
    """Lists the changes from another trial to this one, prototypes included."""
    these, those = ({**each["keys"], **each["prototype"]} for each in (trial, other))
    without = [f"no {key}" for key in those if key not in these]
    return [*(f"{key}={value}" for key, value in these.items() if those.get(key) != value), *without]


def draw(race: Race, path: Path) -> None:
    """Draws a race's speedups, of counting and of its entries, to a PNG: those that hold are joined, others hollow."""
    from matplotlib.figure import Figure  # loads slowly

    names = [race.counted, *(entry.name for entry in race.entries)]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for n, (machine, runs) in enumerate(measured(race).items()):
        color, line = f"C{n}", [(1, 1.0)]
        for entry, results in runs.items():
            logs, (text, holds) = log_speedups(results), verdict(results)
            spot = names.index(entry.name), stats.mean_ratio(logs)
            note = "refused" if entry.refused else "" if holds else text.partition(" (")[0]
            lines = [f"{spot[1]:.1f}×", *textwrap.wrap(note, 24)]  # beside the next entry's
            axis.annotate("\n".join(lines), spot, (8, 0), textcoords="offset points", va="top")
            for interval in stats.intervals({entry: logs} if len(logs) >= stats.LEAST else {}).values():
                axis.plot([spot[0]] * 2, np.exp(interval[1:]), color=color, marker="_")
            if note:
                axis.plot(*spot, color=color, marker="o", fillstyle="none")
            else:
                line.append(spot)
        axis.plot(*zip(*line, strict=True), color=color, marker="o", label=machine)
        for results in beside(runs):
            spot = 0, speedup_of_counting(results)
            axis.plot(*spot, color=color, marker="*")
            axis.annotate(f"{spot[1]:.0f}×", spot, (8, -4), textcoords="offset points")
    axis.set(yscale="log", ylabel=f"speedup over the naive loop ({stats.LEVEL:.0%} intervals)")
    axis.set_xlim(-0.3, len(names) + 0.3)  # with room for the last note
    ticks = 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000
    axis.set_yticks(ticks, [f"{tick}×" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks(range(len(names)), names)
    axis.grid(alpha=0.3)
    axis.legend(title="filled: holds; hollow: does not hold, or not yet")
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
