"""Races, a folder each in records/, and their entries, a folder each in that: files, results and verdicts.

A race has a README.md (a title; Target: the loss to reach.). So has an entry (a title; By NAME, YYYY-MM-DD.), with
config files, at most one patch, and a MACHINE.jsonl of each machine that has run it, which referee.py writes. The rules
are in records/README.md.
"""

import dataclasses
import hashlib
import math
import re
import statistics
import time
from pathlib import Path

from lab.measure import stats
from lab.measure.machine import machine_in_words
from lab.measure.results import ROOT
from lab.measure.runs import LOCK
from lab.measure.runs import read as read_runs
from nanoladder.config import Config
from nanoladder.data import Dataset, ValidationBatches
from nanoladder.data.counting import NAMES, count
from nanoladder.errors import BadInput

RECORDS = ROOT / "records"
SEEDS = 5  # needed for a verdict
P = 0.01  # a gain counts if chance alone produces it less often
MARGIN = 0.005  # bits per byte above the naive loop's loss; rounding alone moves a loss by 0.002 to 0.004
SUFFIXES = (".py", ".patch", ".jsonl", ".png")  # of an entry's files
OURS = ("README.md", LOCK)  # further ones
CHECK = "check"  # the kind of its runs
COUNTED = "counted"  # what a row has that is no network, beside the entries
NAIVES = "the naive loop's loss"  # a race's target; or the name of a counted one
TARGET = re.compile(r"# (?P<title>.+)\n+Target: (?P<target>.+)\.")
HEAD = re.compile(r"# (?P<title>.+)\n+By (?P<by>.+), (?P<date>\d{4}-\d\d-\d\d)\.")
REFUSED = re.compile(r"^Refused: (.+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Race:
    """A folder of records/. target: NAIVES, or the name of a counted loss."""

    folder: Path
    title: str
    target: str

    @property
    def entries(self):
        """Its entries, in order; the first is the naive loop."""
        return [read_entry(path.parent) for path in sorted(self.folder.glob("*/README.md"))]

    @property
    def counted(self):
        """The name of what is counted beside its entries: its target or, for the naive loop's loss, trigrams."""
        return "trigrams" if self.target == NAIVES else self.target


def read_race(folder: Path | str) -> Race:
    """The Race in a folder. Raises BadInput if it is not one."""
    page = Path(folder, "README.md")
    if not (head := TARGET.match(page.read_text(encoding="utf-8") if page.is_file() else "")):
        raise BadInput(f"{page}: expected a race's title, and below it Target: the loss to reach.")
    race = Race(Path(folder), **head.groupdict())
    if race.target not in (NAIVES, *NAMES):
        raise BadInput(f"{page}: Target: {race.target}; expected {NAIVES}, or one of {', '.join(NAMES)}")
    return race


def races() -> list[Race]:
    """All races, by the names of their folders."""
    return [read_race(path.parent) for path in sorted(RECORDS.glob("*/README.md"))]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A folder of a race. refused: the reason that its README.md gives, or none."""

    folder: Path
    title: str
    by: str
    date: str
    refused: str | None

    @property
    def name(self):
        return self.folder.name

    @property
    def race(self):
        return read_race(self.folder.parent)

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

    def current(self):
        """The results of every machine that has run it, with the files that are here."""
        return [results for results in self.results().values() if is_current(self, results)]


def read_entry(folder):
    """The Entry in a folder. Raises BadInput if it is not one."""
    folder = Path(folder).resolve()
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; expected an entry, such as records/below_counting/004_exclusive")
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


def is_current(entry, results):
    """True if results are an entry's: its name, and the digests of its files and of the entries that it faced."""
    digests = {each.name: each.digest for each in entry.race.entries}
    faced = results.get("entries", {})
    return [*faced][-1:] == [entry.name] and faced.items() <= digests.items()


def before(entry):
    """The record that an entry has to beat: the last one before it, by name, neither refused nor failed.

    Raises BadInput for the naive loop, which has none to beat.
    """
    earlier = [
        each for each in entry.race.entries if each.name < entry.name and not each.refused and not has_failed(each)
    ]
    if not earlier:
        raise BadInput(f"{entry.name} is the naive loop, with which all are compared; expected another entry")
    return earlier[-1]


def as_record(entry):
    """The results of other entries' checks in which an entry was the record, as its own, without a verdict."""
    for check in entry.race.entries:
        for results in check.current():
            naive, record, _ = ends(results)
            if naive != record == entry.name:
                faced = {name: results["entries"][name] for name in (naive, record)}
                yield results | {"entries": faced, "record_of": check.name}


def has_failed(entry):
    """True if a check on any machine said that an entry does not hold."""
    return any(verdict(results)[1] is False for results in entry.current())


# -- results of the runs


def results_of(conditions, runs):
    """The results of a check: its conditions, such as the machine and the entries, its runs, and what was counted."""
    counted = next((run.row | run.figures for run in runs if run.row.get("what") == COUNTED), None)
    return {"target": NAIVES} | conditions | {"runs": with_seeds(runs), "counted": counted}


def with_seeds(runs):
    """[{"name": ..., "seed": ..., figures}] of the runs that have a seed."""
    return [run.row | run.figures for run in runs if "seed" in run.row]


def count_tokens(dataset: Dataset, config: Config, name: str) -> dict:
    """Counts a dataset's training tokens. Returns what a run has: seconds, tokens, and the loss of that name.

    The seconds are CPU time, on one core, of counting alone: without imports.
    """
    start = time.process_time()
    loss = count(dataset, *dataset.val.read(ValidationBatches(dataset.val, config).chosen))[name]
    seconds, n_tokens = round(time.process_time() - start, 4), len(dataset.train.tokens)
    return {"seconds": seconds, "tokens": n_tokens, "loss": loss, "bpb": loss * (dataset.bits_per_nat or math.nan)}


def verdict(results):
    """Returns the verdict of a check's results in words, and whether the entry holds: True, False, or None: not known.

    It holds if it is faster than the record before it, and below the target: a counted loss, or MARGIN above the naive
    loop's. Both on SEEDS seeds, each with a probability below P that chance alone does as well.
    """
    if check := results.get("record_of"):
        return f"the record in {check}'s check", None
    runs, (naive, record, name) = results["runs"], ends(results)
    speedups = stats.paired(runs, record, name, "seconds", stats.log_ratio)
    if results["target"] == NAIVES:
        below = stats.paired(runs, naive, name, "bpb", lambda first, second: first + MARGIN - second)
    else:
        below = [results["counted"]["bpb"] - bpb for bpb in stats.by_seed(runs, name, "bpb").values()]
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


def measured(race: Race) -> dict:
    """{machine in words: {Entry: results}} of all entries of a race that have run against the naive loop.

    An entry that was not checked has the results of the next one's check, whose record it was.
    """
    machines = {}
    for entry in race.entries:
        # Without those of an interrupted check's first seed
        for results in filter(log_speedups, entry.current() or as_record(entry)):
            machines.setdefault(machine_in_words(results["machine"]), {})[entry] = results
    return machines


def seconds(race: Race) -> dict[str, float]:
    """{name of an entry of a race: median seconds of its runs, on any machine}."""
    times = {}
    for run in [run for entry in race.entries for results in entry.current() for run in results["runs"]]:
        times.setdefault(run["name"], []).append(run["seconds"])
    return {name: statistics.median(each) for name, each in times.items()}
