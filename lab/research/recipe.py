"""Measures the token efficiency of each rung: python profile.py config/recipe_small.py --mode=recipe [--minutes=60]

Trains the runs that the protocol wants (protocol.py), then times the step of every row in rounds, and counts its
memory. The same command continues.

--kept=a,b,c: rungs kept at another scale, which are not screened. --on=a,b,c: the base includes these rungs.
--rungs=d,e: of the others, only these are measured.
"""

import dataclasses
import functools
import math
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from lab.measure import measurements
from lab.measure.cli import command_line
from lab.measure.git import commit
from lab.measure.launch import run_alone
from lab.measure.machine import machine_name
from lab.measure.results import free_folder, presets, under
from lab.measure.runs import RUNS, Failed, Runs, in_words
from lab.measure.training import Child
from lab.predict.predict import costs
from lab.research.protocol import Protocol, TrainingRun
from lab.research.recipe_report import report
from nanoladder.config import Config, apply, differences, stages
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.machine import choose_device
from nanoladder.run import load_config

ROUNDS = 3  # processes that time each row's step
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # more only compete


@functools.cache
def row_of(run):
    """The row of a run. Runs of one config are the same row, whatever their names."""
    about = {"name": run.name, "lr_factor": run.factor, "length": run.length, "seed": run.seed}
    return {"what": "train", "keys": differences(run.resolved()), "about": about}


def train(row):
    """Trains the config of a row in a process with one thread. Yields while it waits, and returns the figures."""
    with Child(command_line(row["keys"]), ONE_THREAD) as child:
        while not (outcome := child.outcome()):
            yield
    if outcome.pop("failed"):
        raise Failed(outcome["note"])
    return outcome


def measure(options: Namespace, words: list[str]) -> None:
    """Trains the missing runs for --minutes, and writes the report on all of them."""
    config = load_config(words)
    rungs = select_rungs(rungs_of(config), options.on or (), options.rungs or ())
    if absent := [name for name in options.kept or () if name not in rungs]:
        raise BadInput(f"--kept={absent[0]}: --on has it, or --rungs leaves it out; expected rungs that are measured")
    protocol = functools.partial(Protocol, config, rungs, kept=options.kept or ())
    protocol(loss=None).require_valid()
    dataset = open_dataset(config)

    @functools.cache
    def parameters(config):
        return costs(dataclasses.replace(config, vocab_size=dataset.vocab_size))["n_params"]

    end = time.monotonic() + 60 * options.minutes
    with opened("recipe", options, words) as runs:

        def follow():
            return protocol(losses_in(runs)).follow()

        try:
            train_wanted(runs, follow, end)
            if not (followed := follow()).wanted:
                list(runs.take(lambda: steps_of(followed), measure_step, end, unit="process"))
        finally:
            report(follow(), runs, words, options.on, parameters)


def opened(kind: str, options: Namespace, words: list[str]) -> Runs:
    """The Runs of a kind, of a config's command line, on its dataset."""
    config = load_config(words)
    machine = machine_name(run_alone(measurements.machine_facts, config))
    conditions = {"data": open_dataset(config).fingerprint()}
    first = Path("results", machine, presets(words))
    folder = Path(options.out_dir or free_folder(first, f"{kind}.md", kind, under(conditions)))
    return Runs(folder / RUNS, kind, conditions, {"machine": machine, "commit": commit()})


def losses_in(runs: Runs) -> Callable[[TrainingRun], float | None]:
    """A function of a run: its final loss in nats per token; infinite if it failed, None if it is missing."""

    @functools.cache
    def loss(run):
        if (row := row_of(run)) in runs:
            return (runs.figures(row) or {}).get("val_loss") or math.inf

    return loss


def train_wanted(runs: Runs, follow: Callable[[], Protocol], end: float) -> None:
    """Trains the runs that a Protocol wants, one on each thread of a CPU, and starts none after `end`."""

    def wanted():
        trained = [run.row for run in runs if run.row["what"] == "train" and run.figures]
        return [*trained, *map(row_of, follow().wanted)]

    at_once = torch.get_num_threads() if choose_device(follow().config.device).type == "cpu" else 1
    for run in runs.take(wanted, train, end, at_once, "run"):
        text = run.failed or run.figures["note"] or format(run.figures["val_loss"], ".4f")
        tqdm.write(f"{in_words(run.row)}: {text}")


def steps_of(protocol):
    """The rows of the time of a step, in rounds, and then of its memory."""
    rows, wanted = [row for row in [protocol.base, *protocol.rows] if row.factor], []
    for n in range(1, ROUNDS + 2):
        what = {"what": "time", "round": n} if n <= ROUNDS else {"what": "profile"}
        wanted += [what | step_of(row) for row in rows[:: 1 if n % 2 else -1]]
    return wanted


def step_of(row):
    return {"keys": differences(row.config), "about": {"name": row.name}}


def measure_step(row):
    """Measures the seconds, or the peak bytes, of a step. Raises BadInput if it fails."""
    config = dataclasses.replace(Config(), **row["keys"])
    try:
        if row["what"] == "profile":
            return {"peak": run_alone(measurements.profile_step, config)["memory"]["peak"]}
        return {"seconds": run_alone(measurements.time_steps, config)["seconds"]}
    except RuntimeError as error:
        raise BadInput(f"the step of {row['about']['name']} cannot be measured: {error}") from None


def rungs_of(config):
    """{name: changes of the config} of the files in config/recipe, in order."""
    values, rungs = vars(config), {}
    for name, path in stages.files(stages.RECIPE_DIR).items():
        after = apply([path], {}, values)
        rungs[name] = {key: after[key] for key in after if after[key] != values[key]}
        values = after
    return rungs


def select_rungs(rungs, on, names):
    """The rungs to measure: the base, with the rungs that it already has, then those of these names, or all others.

    rungs: {name: changes of the config}, first the base's. Raises BadInput if none is left.
    """
    first, *others = rungs
    base = {key: value for name in (first, *on) for key, value in rungs[name].items()}
    if not (wanted := [name for name in others if name in (names or others) and name not in on]):
        raise BadInput("--on, --rungs: the base has every rung that is to be measured; expected others for --rungs")
    return {first: base} | {name: rungs[name] for name in wanted}
