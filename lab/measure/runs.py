"""The one engine of measurements: a row that was measured is a line of a file, and is not measured again.

A row is a dict that says what is measured. Its line adds the figures, or the reason why there are none:

    {"begin": "steps", "machine": ..., "code": ...}     the conditions of the lines below, which are of one kind
    {"mode": "ladder", "name": "amp", "what": "time", "round": 3, "figures": {"seconds": 0.21}}
    {"mode": "ladder", "name": "flash", "what": "time", "round": 3, "failed": "out of memory"}

Rows are the same if they agree in all but `about`, words for the reader. The last line of a row counts. A mode is a
function that returns the rows that it wants, in order, and another that makes a table of the runs.
"""

import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from nanoladder import files
from nanoladder.errors import BadInput, reading, writing

RUNS = "runs.jsonl"  # in a folder of results
LOCK = ".lock"
OUTCOME = {"figures", "failed"}  # members of a line
NOT_IDENTITY = OUTCOME | {"about"}
PAUSE = 0.2  # seconds between two looks at what is running
MINUTE = 60.0  # seconds between two lines of progress in a file


class Run(NamedTuple):
    """A row that was measured under these conditions. failed: the reason why it has no figures, or None."""

    row: dict
    figures: dict | None
    failed: str | None
    conditions: dict


class Failed(Exception):
    """Raised if a row cannot be measured, with the reason."""


class Runs:
    """The runs of a kind in a file. A context manager, in which no other process may write to the file's folder.

    On entry, raises BadInput if the runs were measured under other conditions; with anew=True it forgets them instead.
    origin: further conditions, which may differ from run to run.
    """

    def __init__(
        self, path: Path | str, kind: str, conditions: dict, origin: dict | None = None, anew: bool = False
    ) -> None:
        self.path, self.kind, self.conditions, self.anew = Path(path), kind, conditions, anew
        self.heading = {"begin": kind, **conditions, **(origin or {})}

    def __enter__(self):
        folder = self.path.parent
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = files.hold(folder / LOCK)
            except BlockingIOError:
                raise BadInput(f"another command writes to {folder}; choose another --out_dir") from None
        try:
            self.load()
        except BaseException:
            self.lock.close()
            raise
        return self

    def __exit__(self, *_):
        self.lock.close()

    def load(self):
        """Reads the file, and removes the end of a line that was not written to its end."""
        lines = read_lines(self.path)
        if self.path.exists() and not (content := self.path.read_bytes()).endswith(b"\n"):
            with writing(self.path.parent):
                files.write(self.path, content[: content.rfind(b"\n") + 1])
        conditions, runs = runs_in(lines, self.kind)
        different = different_conditions(conditions, self.conditions) if runs else []
        if different and not self.anew:
            other = " and ".join(different)
            raise BadInput(f"{self.path} was measured under another {other}; choose another --out_dir, or remove it")
        self.runs = {identity(run.row): run for run in runs}
        self.over = {key for key, run in self.runs.items() if run.failed is None}
        self.last = next((line for line in reversed(lines) if "begin" in line), None)  # whose runs an added line joins
        if different:
            self.restart()

    def restart(self):
        """Forgets the runs, which stay in the file."""
        self.runs, self.over, self.heading = {}, set(), self.heading | {"anew": True}
        self.last = None

    def __contains__(self, row):
        """True if a row need not be measured: it has figures, or failed in this session."""
        return identity(row) in self.over

    def __iter__(self):
        return iter(self.runs.values())

    def figures(self, row: dict) -> dict | None:
        """The figures of a row, or None."""
        run = self.runs.get(identity(row))
        return run and run.figures

    def add(self, row: dict, figures: dict | None, failed: str | None = None) -> Run:
        """Appends the outcome of a row to the file. Returns the Run."""
        members = {key: value for key, value in {"figures": figures, "failed": failed}.items() if value is not None}
        lines = [row | members] if self.last == self.heading else [self.heading, row | members]
        with writing(self.path.parent), open(self.path, "ab") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self.last = self.heading
        self.over.add(identity(row))
        self.runs[identity(row)] = run = Run(row, figures, failed, self.heading)
        return run

    def put(self, row: dict, figures: dict) -> None:
        """Adds the figures of a row, unless they are there."""
        if self.figures(row) != figures:
            self.add(row, figures)

    def take(
        self,
        wanted: Callable[[], list[dict]],
        measure: Callable,
        end: float = math.inf,
        at_once: int = 1,
        unit: str = "run",
    ) -> Iterator:
        """Measures rows, at_once in parallel, and yields each Run, until none is missing; starts none after `end`.

        wanted: function without arguments; the rows, in order. It is called after each run. measure: function of a row;
        returns its figures or raises Failed. It may be a generator, which yields while it waits. end: time.monotonic().
        """
        running, rows = {}, wanted()
        missing = [row for row in rows if row not in self]
        often = PAUSE if sys.stderr.isatty() else MINUTE
        with tqdm(unit=unit, initial=len(rows) - len(missing), mininterval=often, miniters=0) as bar:
            try:
                while True:
                    bar.total = bar.n + len(missing)
                    for row in missing:
                        if len(running) < at_once and identity(row) not in running and time.monotonic() < end:
                            running[identity(row)] = row, as_generator(measure, row)
                    if not running:
                        return
                    bar.set_postfix_str(" | ".join(in_words(row) for row, _ in running.values()), refresh=False)
                    bar.update(0)
                    over = {key: each for key, (_, work) in running.items() if (each := outcome(work))}
                    for key, result in over.items():
                        row, _ = running.pop(key)
                        bar.update()
                        yield self.add(row, *result)
                    if over:
                        missing = [row for row in wanted() if row not in self]
                    else:
                        time.sleep(PAUSE)
            finally:
                for _, work in running.values():
                    work.close()


def different_conditions(there: dict, conditions: dict) -> list[str]:
    """The names of the conditions that were others there."""
    return [key for key, value in conditions.items() if there.get(key) != value]


def as_generator(measure, row):
    """Makes a generator of a measurement, which has not started yet."""
    result = measure(row)
    return (yield from result) if inspect.isgenerator(result) else result


def outcome(work):
    """Continues a measurement. Returns its figures and the reason why it failed, or None while it waits."""
    try:
        next(work)
    except StopIteration as over:
        return over.value, None
    except Failed as reason:
        return None, str(reason)


def identity(row):
    """A row as text, equal for equal rows."""
    return json.dumps({key: value for key, value in row.items() if key not in NOT_IDENTITY}, sort_keys=True)


def in_words(row: dict) -> str:
    """Names a row beside the progress bar."""
    words = row.get("about") or {key: value for key, value in row.items() if not isinstance(value, dict)}
    return ", ".join(f"{key} {value:g}" if isinstance(value, int | float) else value for key, value in words.items())


def read(path: Path, kind: str) -> tuple[dict, list]:
    """The conditions of the runs of a kind in a file, and these runs in order; {} and [] if there are none.

    Raises BadInput if the file cannot be read or has another format.
    """
    return runs_in(read_lines(path), kind)


def runs_in(lines, kind):
    """Returns what read() does, of a file's lines."""
    conditions, runs, of_kind = {}, {}, False
    for line in lines:
        if "begin" in line:
            of_kind = line["begin"] == kind
            conditions = line if of_kind else conditions
            runs = {} if of_kind and line.get("anew") else runs
        elif of_kind:
            row = {key: value for key, value in line.items() if key not in OUTCOME}
            runs[identity(row)] = Run(row, line.get("figures"), line.get("failed"), conditions)
    return conditions, [*runs.values()]


def read_lines(path):
    """The lines of a file, without an interrupted last one; [] if there is no file. Raises BadInput as read() does."""
    if not Path(path).exists():
        return []
    with reading(f"{path} is not a file of runs of profile.py", "expected one, or remove it"):
        text = files.read(Path(path), limit=2**30).decode()
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        if not all("begin" in line or OUTCOME & line.keys() for line in lines):
            raise ValueError("a line has no figures")
    return lines
