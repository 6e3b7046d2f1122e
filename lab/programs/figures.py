"""Measured figures of stages and rungs, read from the files in results/."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lab.measure import summary, tables
from lab.measure.machine import machine_in_words
from lab.measure.results import read, read_results
from lab.programs.bundle import FOLDER
from nanoladder.config import DEFAULTS, apply, parse_arguments, stage_names
from nanoladder.config.stages import needs_several
from nanoladder.errors import BadInput

RESULTS = FOLDER / "results"
# The README, the page's first view and its picture show these figures. To show others, change this line, then run
# python ladder.py docs; make pages; chromium --headless --hide-scrollbars --force-device-scale-factor=1.5 \
#     --window-size=1440,900 --screenshot=docs/ladder-page.png "file://$PWD/out/pages/index.html#amp"
SHOWN = {  # {the README's words for a machine: machine/config}; the page begins with the first
    "two cores": "amd-epyc-2-threads-bf16/reference",
    "an H200": "nvidia-h200/reference-50257",
}
BY_LOSS = {  # {parameters of GPT-2's model: the figures of the second ladder's table}
    "1.3M": RESULTS / "amd-epyc-1-threads-bf16" / "recipe_small_by_loss",
    "3.5M": RESULTS / "amd-epyc-1-threads-bf16" / "recipe_192_by_loss",
}
SCALING = {  # stages of several processes: the mode that measures them
    stage: "scaling" if stage == "ddp" else f"scaling-{stage.removesuffix('_parallel')}"
    for stage in filter(needs_several, stage_names())
}
CODE = "code"  # the word for the recipe configs' own corpus


class Measured(NamedTuple):
    """Figures of a mode on one machine."""

    key: str  # machine/config
    mode: str
    results: dict  # the contents of a runs.jsonl
    rows: dict  # {row: its summary}


class Scale(NamedTuple):
    """Figures of the second ladder on one machine, at one scale."""

    corpus: str
    parameters: int  # of the base
    on: list  # rungs that the base has already
    max_steps: int  # of a run of length 1
    rows: dict  # {row: its figures}

    def steps(self, rung):
        """The steps of the runs that judge a rung: of its own row or, if it was only left out, of the whole recipe."""
        rows = (self.rows.get(rung, {}), *reversed(self.rows.values()))
        return round(self.max_steps * next(row["length"] for row in rows if row.get("length")))


@cache
def measured(mode: str, paths: Iterable[Path] = ()) -> dict:
    """Returns {machine/config: Measured} of every runs.jsonl that contains a mode.

    A reader's own files, at paths, come first, then the README's, then the others in results/.
    """
    first = RESULTS / next(iter(SHOWN.values()))
    ours = sorted(RESULTS.glob("*/*/runs.jsonl"), key=lambda path: (path.parent != first, path))
    every = {}
    for path in (*paths, *ours):
        results, key = read_results(path), "/".join(path.resolve().parts[-3:-1])
        if mode in results["modes"] and key not in every:
            rows = {row["name"]: row for row in summary.summarize(results, mode)}
            every[key] = Measured(key, mode, results, rows)
    return every


def check(paths: Iterable[Path]) -> None:
    """Raises BadInput if one of a reader's own files has nothing to show."""
    for path in paths:
        if not read_results(path)["modes"].keys() & {"ladder", *SCALING.values()}:
            wrong = "holds no stages" if path.exists() else "does not exist"
            raise BadInput(f"{path} {wrong}; expected a runs.jsonl of --mode=ladder or scaling")


def shown(machine: str = "two cores") -> Any:
    """Returns the README's figures of a machine in SHOWN."""
    return measured("ladder")[SHOWN[machine]]


def stage_figures(name, paths=()):
    """Returns the figures that include a stage: its scaling on each machine if it needs several processes, then all."""
    scaling = measured(SCALING[name], paths).values() if name in SCALING else []
    return [*scaling, *measured("ladder", paths).values()]


def compared(row, other):
    """Returns how many times as fast as another a row of summary.summarize is, and in how much less memory."""
    smaller = other["peak"] / row["peak"]
    return tables.gain(row, other["name"]), "≈ 1" if abs(smaller - 1) < 0.01 else f"{smaller:.2f}×"


def relative(stage, rows):
    """Returns a stage's speed and memory relative to the stage that it stands on; of the first, in ms and GB.

    Texts; empty if the stage is not among the rows of --mode=ladder.
    """
    rows = {name: row for name, row in rows.items() if "peak" in row}
    if stage not in rows:
        return "", ""
    row, below = rows[stage], rows.get(summary.row_below(stage, rows))
    if below is None:
        return f"{tables.milliseconds(row['seconds'])} ms", f"{row['peak'] / 1e9:.3f} GB"
    return compared(row, below)


@cache
def by_loss() -> dict[str, dict[str, dict[float, dict]]]:
    """Returns {rung: {scale in BY_LOSS: {the finished recipe's loss: what the rung saves there}}}, of what has run.

    A rung of the trunk was left out of the recipe, another added to it.
    """
    saved = {}
    for scale, folder in BY_LOSS.items():
        results = read(folder / "by_loss.json", ["losses", "gains"])
        for row, gains in results["gains"].items():
            rung = row.partition(" ")[2]  # none in "base"
            at = {loss: gain for loss, gain in zip(results["losses"], gains, strict=True) if gain}
            if rung and at:
                saved.setdefault(rung, {})[scale] = at
    return saved


def rung_scales(name):
    """Returns {machine: the Scales at which a rung was measured}: code first, and the longest runs."""
    chosen = {}
    for machine, every in scales():
        if known := [each for each in every if {"verdict", "alone"} & each.rows.get(name, {}).keys()]:
            chosen[machine] = sorted(known, key=lambda scale: order(scale, name))
    return dict(sorted(chosen.items(), key=lambda item: order(item[1][0], name)))


def order(scale, rung):
    return scale.corpus != CODE, scale.corpus, -scale.steps(rung)


@cache
def scales():
    """Returns [(machine, its Scales)]."""
    machines = {}
    for path in sorted(RESULTS.glob("*/*/recipe.json")):
        results, (machine, _) = read(path, ["rows"]), path.parts[-3:-1]
        paths, _, given = parse_arguments(results["config"])
        steps = apply([FOLDER / path for path in paths], given, DEFAULTS)["max_steps"]
        base, rows = results["rows"][0], {row["name"]: row for row in results["rows"]}
        scale = Scale(given.get("dataset", CODE), base["parameters"], results.get("on") or [], steps, rows)
        machines.setdefault(machine, []).append(scale)
    return list(machines.items())


def describe_machine(folder: str) -> str:
    """Describes the machine of a folder in results/ by the first runs in it that have one; without any, its name."""
    every = (read_results(path) for path in sorted(RESULTS.glob(f"{folder}/*/runs.jsonl")))
    machine = next((results["machine"] for results in every if "machine" in results), None)
    return machine_in_words(machine) if machine else folder
