"""Entries of the race, one folder each in records/: their files, gains and verdicts.

An entry has a README.md (a title; By NAME, YYYY-MM-DD.), config files, at most one patch, and a MACHINE.jsonl of each
machine that has run it, which referee.py writes. The rules are in records/README.md.
"""

import dataclasses
import hashlib
import math
import re
import statistics
import time
from pathlib import Path

import numpy as np

from lab.measure import stats, tables
from lab.measure.machine import machine_in_words
from lab.measure.results import ROOT, read
from lab.measure.runs import LOCK
from lab.measure.runs import read as read_runs
from nanoladder import files
from nanoladder.config import Config
from nanoladder.data import Dataset, ValidationBatches
from nanoladder.data.counting import count
from nanoladder.errors import BadInput

RECORDS = ROOT / "records"
RESULTS = ROOT / "results"
PAGE, PICTURE, TRIED = RECORDS / "README.md", RECORDS / "records.png", RECORDS / "tried.md"
SEEDS = 5  # needed for a verdict
P = 0.01  # a gain counts if chance alone produces it less often
MARGIN = 0.005  # bits per byte above the naive loop's loss; rounding alone moves a loss by 0.002 to 0.004
SUFFIXES = (".py", ".patch", ".jsonl", ".png")  # of an entry's files
OURS = ("README.md", LOCK)  # further ones
CHECK = "check"  # the kind of its runs
TRIGRAMS = {"name": "trigrams", "what": "counted"}  # a row beside them: no network
HEAD = re.compile(r"# (?P<title>.+)\n+By (?P<by>.+), (?P<date>\d{4}-\d\d-\d\d)\.")
REFUSED = re.compile(r"^Refused: (.+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A folder of records/. refused: the reason that its README.md gives, or none."""

    folder: Path
    title: str
    by: str
    date: str
    refused: str | None

    @property
    def name(self):
        return self.folder.name

    @property
    def configs(self):
        return sorted(self.folder.glob("*.py"))

    @property
    def patch(self):
        return next(self.folder.glob("*.patch"), None)

    @property
    def digest(self):
        """SHA-256 of the code that runs: the config files and the patch."""
        digest = hashlib.sha256()
        for path in [*self.configs, *filter(None, [self.patch])]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()

    def seeds(self, n):
        """The seeds of a check, derived from the entry's digest."""
        return [int(hashlib.sha256(f"{self.digest} {i}".encode()).hexdigest(), 16) % 10**6 for i in range(n)]

    def results(self):
        """The results in its folder, {file name: results}."""
        return {path.name: results_of(*read_runs(path, CHECK)) for path in sorted(self.folder.glob("*.jsonl"))}

    def races(self):
        """The results of every machine that has run it, with the files that are here."""
        return [results for results in self.results().values() if is_current(self, results)]


def read_entry(folder):
    """The Entry in a folder. Raises BadInput if it is not one."""
    folder = Path(folder).resolve()
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; expected an entry, such as records/004_key_offset")
    page = folder / "README.md"
    if not page.is_file():
        raise BadInput(f"{folder} has no README.md; expected one that says what is new, why, by whom and when")
    text = page.read_text(encoding="utf-8")
    if not (head := HEAD.match(text)):
        raise BadInput(f"{page}: expected a title, # what is new, and below it By NAME, YYYY-MM-DD.")
    strange = [path.name for path in folder.iterdir() if path.suffix not in SUFFIXES and path.name not in OURS]
    if strange:
        raise BadInput(f"{folder} holds {min(strange)}; expected README.md, config files, a .patch, .jsonl and .png")
    refused = REFUSED.search(text)
    entry = Entry(folder, **head.groupdict(), refused=refused and refused[1])
    if not entry.configs or len(list(folder.glob("*.patch"))) > 1:
        raise BadInput(f"{folder}: expected at least one config file and at most one .patch")
    return entry


def entries():
    """All entries, in order; the first is the naive loop."""
    return [read_entry(path.parent) for path in sorted(RECORDS.glob("*/README.md"))]


def is_current(entry, results):
    """True if results are an entry's: its name, and the digests of its files and of the entries that it faced."""
    digests = {each.name: each.digest for each in entries()}
    faced = results.get("entries", {})
    return [*faced][-1:] == [entry.name] and faced.items() <= digests.items()


def before(entry):
    """The record that an entry has to beat: the last one before it, by name, neither refused nor failed.

    Raises BadInput for the naive loop, which has none to beat.
    """
    earlier = [each for each in entries() if each.name < entry.name and not each.refused and not has_failed(each)]
    if not earlier:
        raise BadInput(f"{entry.name} is the naive loop, with which all are compared; expected another entry")
    return earlier[-1]


def has_failed(entry):
    """True if a check on any machine said that an entry does not hold."""
    return any(verdict(results)[1] is False for results in entry.races())


# -- results of the runs


def results_of(conditions, runs):
    """The results of a check: its conditions, such as the machine and the entries, its runs, and trigrams counted."""
    counted = next((run.figures for run in runs if run.row == TRIGRAMS), None)
    return conditions | {"runs": with_seeds(runs), "counted": counted}


def with_seeds(runs):
    """[{"name": ..., "seed": ..., figures}] of the runs that have a seed."""
    return [run.row | run.figures for run in runs if "seed" in run.row]


def count_trigrams(dataset: Dataset, config: Config) -> dict:
    """Counts a dataset's training tokens. Returns what a run has: seconds, tokens, and the loss of trigrams.

    The seconds are CPU time, on one core, of counting alone: without imports.
    """
    start = time.process_time()
    loss = count(dataset, *dataset.val.read(ValidationBatches(dataset.val, config).chosen))["trigrams"]
    seconds, n_tokens = round(time.process_time() - start, 4), len(dataset.train.tokens)
    return {"seconds": seconds, "tokens": n_tokens, "loss": loss, "bpb": loss * (dataset.bits_per_nat or math.nan)}


def verdict(results):
    """Returns the verdict of a check's results in words, and whether the entry holds: True, False, or None: not known.

    It holds if it is faster than the record before it, and not more than MARGIN above the naive loop's loss: both on
    SEEDS seeds, each with a probability below P that chance alone does as well.
    """
    runs, (naive, record, name) = results["runs"], ends(results)
    speedups = stats.paired(runs, record, name, "seconds", stats.log_ratio)
    below = stats.paired(runs, naive, name, "bpb", lambda first, second: first + MARGIN - second)
    if len(speedups) < SEEDS or len(below) < SEEDS:
        return f"no verdict: {min(len(speedups), len(below))} of {SEEDS} seeds", None
    of_loss, of_time = stats.p_value(below), stats.p_value(speedups)
    if of_loss >= P:
        return f"misses the loss (p = {of_loss:.2g})", False
    if of_time >= P:
        return f"no gain on {record} (p = {of_time:.2g})", False
    return f"holds (p = {max(of_loss, of_time):.2g})", True


def compared(results, record, entry):
    """Compares an entry's runs with the record's, as text."""
    logs = stats.paired(results["runs"], record.name, entry.name, "seconds", stats.log_ratio)
    losses = stats.paired(results["runs"], record.name, entry.name, "bpb", lambda first, second: second - first)
    return (
        f"It is {stats.mean_ratio(logs):.2f} times faster than {record.name}, {statistics.fmean(losses):+.4f} bits "
        f"per byte from its loss, on {len(logs)} seeds: no verdict, which takes the naive loop and {SEEDS} seeds"
    )


def ends(results):
    """Names of the naive loop, the record to beat and the entry."""
    names = [*results["entries"]]
    return names[0], names[-2], names[-1]


def log_speedups(results: dict) -> list[float]:
    """Logarithms of the speedup of the entry over the naive loop, by seed."""
    naive, _, name = ends(results)
    return stats.paired(results["runs"], naive, name, "seconds", stats.log_ratio)


def measured() -> dict:
    """{machine in words: {Entry: results}} of all that has run against the naive loop."""
    machines = {}
    for entry in entries():
        for results in filter(log_speedups, entry.races()):  # without those of an interrupted check's first seed
            machines.setdefault(machine_in_words(results["machine"]), {})[entry] = results
    return machines


def seconds() -> dict[str, float]:
    """{name of an entry: median seconds of its runs, on any machine}."""
    times = {}
    for run in [run for entry in entries() for results in entry.races() for run in results["runs"]]:
        times.setdefault(run["name"], []).append(run["seconds"])
    return {name: statistics.median(each) for name, each in times.items()}


def figures(entry: Entry, results: dict) -> dict[str, str]:
    """The texts of an entry's row on one machine."""
    runs, (naive, _, name), logs = results["runs"], ends(results), log_speedups(results)
    text, _ = verdict(results)
    seconds = stats.by_seed(runs, name, "seconds")
    if len(logs) >= SEEDS and set(seconds) != set(entry.seeds(len(seconds))):
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
    """The results of a machine, {Entry: results}, in which trigrams were counted beside the naive loop; the last."""
    return [results for results in runs.values() if results["counted"]][-1:]


def speedup_of_trigrams(results: dict) -> float:
    """How much faster trigrams were counted than the naive loop trained: its median time divided by theirs."""
    seconds = stats.by_seed(results["runs"], ends(results)[0], "seconds").values()
    return statistics.median(seconds) / results["counted"]["seconds"]


def figures_of_trigrams(results: dict) -> dict[str, str]:
    """The texts of the row of counted trigrams, beside the naive loop's runs of the same results."""
    counted, naive = results["counted"], ends(results)[0]
    of = {key: [*stats.by_seed(results["runs"], naive, key).values()] for key in ("seconds", "tokens", "bpb")}
    minutes = statistics.median(of["seconds"]) / 60
    return {
        "minutes (naive)": f"{counted['seconds'] / 60:.2f} ({minutes:.2f})",
        "speedup": f"{speedup_of_trigrams(results):.0f}×",
        "tokens ×": f"{statistics.median(of['tokens']) / counted['tokens']:.1f}",
        "bits/byte (naive)": f"{counted['bpb']:.4f} ({statistics.fmean(of['bpb']):.4f})",
        "verdict": "no network: a table of counts",
    }


def rows_of(runs: dict) -> dict[str, dict[str, str]]:
    """The texts of a machine's rows, {name: {heading: text}}: trigrams, then the entries of {Entry: results}."""
    rows = [(TRIGRAMS["name"], figures_of_trigrams(results)) for results in beside(runs)]
    return dict(rows) | {entry.name: figures(entry, results) for entry, results in runs.items()}


def news() -> dict:
    """{Entry: what it is, by whom, and when}. Results that are of other files are named there, and have no row."""
    texts = {}
    for entry in entries():
        texts[entry] = f"{entry.title} ({entry.by}, {entry.date})"
        for name in [name for name, results in entry.results().items() if not is_current(entry, results)]:
            texts[entry] += f"; its {name} is not of these files: no row, remove it and check again"
    return texts


def table() -> str:
    """Lists the entries, then a table of results for each machine, in Markdown."""
    parts = ["\n".join(f"- [{entry.name}]({entry.name}/README.md): {text}" for entry, text in news().items())]
    for machine, runs in measured().items():
        parts.append(f"{machine}:\n\n{tables.texts(rows_of(runs))}")
    return "\n\n".join(parts)


def on_terminal() -> str:
    """What table() has, for a terminal; each verdict below its table."""
    parts = ["\n".join(tables.wrapped(f"{entry.name}: {text}") for entry, text in news().items())]
    for machine, runs in measured().items():
        rows = rows_of(runs)
        verdicts = "\n".join(tables.wrapped(f"{name}: {row.pop('verdict')}") for name, row in rows.items())
        parts.append(f"{machine}\n\n{tables.texts(rows, tables.plain)}\n\n{verdicts}")
    return "\n\n".join(parts)


def page() -> str:
    """Returns records/README.md with the part between its <!-- records --> marks rewritten."""
    return re.sub(
        r"(<!-- records -->\n).*?(\n<!-- records -->)",
        lambda marks: f"{marks[1]}{table()}{marks[2]}",
        PAGE.read_text(encoding="utf-8"),
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


def draw(path: Path) -> None:
    """Draws the speedup of counting, then over the entries, to a PNG: those that hold are joined, the others hollow."""
    from matplotlib.figure import Figure  # loads slowly

    names = [TRIGRAMS["name"], *(entry.name for entry in entries())]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for n, (machine, runs) in enumerate(measured().items()):
        color, line = f"C{n}", [(1, 1.0)]
        for entry, results in runs.items():
            logs, (text, holds) = log_speedups(results), verdict(results)
            spot = names.index(entry.name), stats.mean_ratio(logs)
            note = "" if holds and not entry.refused else f" {'refused' if entry.refused else text.partition(' (')[0]}"
            axis.annotate(f"{spot[1]:.1f}×{note}", spot, (8, -12), textcoords="offset points")
            for interval in stats.intervals({entry: logs} if len(logs) >= stats.LEAST else {}).values():
                axis.plot([spot[0]] * 2, np.exp(interval[1:]), color=color, marker="_")
            if note:
                axis.plot(*spot, color=color, marker="o", fillstyle="none")
            else:
                line.append(spot)
        axis.plot(*zip(*line, strict=True), color=color, marker="o", label=machine)
        for results in beside(runs):
            spot = 0, speedup_of_trigrams(results)
            axis.plot(*spot, color=color, marker="*")
            axis.annotate(f"{spot[1]:.0f}×", spot, (8, -4), textcoords="offset points")
    axis.set(yscale="log", ylabel=f"speedup over the naive loop ({stats.LEVEL:.0%} intervals)", xlim=(-0.3, len(names)))
    ticks = 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000
    axis.set_yticks(ticks, [f"{tick}×" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks(range(len(names)), names)
    axis.grid(alpha=0.3)
    axis.legend(title="filled: holds; hollow: does not hold, or not yet")
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
