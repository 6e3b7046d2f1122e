"""Checks an entry of the race: python ladder.py check records/NAME [--seeds=5] [--quick]

Each contestant runs in a copy of the commit that is checked out, the entry with its patch. First come the rules that a
machine can check: files, keys and functions that an entry may not change, and weights that ignore the seed. Then the
entry, the record before it and the naive loop train in turns, on seeds derived from the entry's digest. The entry's
first run is repeated, watched, with the validation tokens in random order: it must train as before, end worse, and
read nothing else. A quick check leaves out the naive loop, which takes most of the time.
"""

import ast
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from lab.measure import tables
from lab.measure.cli import command_line
from lab.measure.git import commit, git, unpack
from lab.measure.launch import reason_of_exit, run_alone
from lab.measure.machine import machine_name
from lab.measure.measurements import machine_facts
from lab.measure.results import code_hash
from lab.measure.runs import Runs
from lab.research import race, records
from nanoladder import files
from nanoladder.checkpoint import format
from nanoladder.config import DEFAULTS
from nanoladder.data import open_dataset
from nanoladder.entry import end_on_signals
from nanoladder.errors import BadInput
from nanoladder.prepare.meta import sample_digest
from nanoladder.run import load_config

PARTS = [":(glob)*.py", "config", "data", "lab", "nanoladder", "operators"]  # of the repository, that a copy has
OPEN = re.compile(  # to a patch
    r"(train|model)\.py|config/\w+\.py|operators/\w+\.py|nanoladder/(?!(?:data|prepare|tokenizer)/)[\w/]+\.py"
)
OURS = ("seed", "init_from")  # keys that the check sets, or that bring weights from before
FEW = 2  # seeds of a quick check
STILL = {"max_steps": 1, "learning_rate": 1e-30, "min_lr": 1e-30, "warmup_steps": 0}
STILL |= {"lr_decay_steps": 0, "eval_interval": 0, "save_interval": 1, "compile": False}
KEYS = "import json, sys; from nanoladder.run import load_config; print(json.dumps(vars(load_config(sys.argv[1:]))))"
SYSTEM = ("/dev", "/etc", "/lib", "/proc", "/sys", "/usr")
CLOSE = 0.005  # bits per byte between training losses that are the same
SPARE = 0.5  # cores beyond the naive loop's threads, for the loader


def check(options: Namespace) -> int:
    """Checks an entry, prints the verdict and writes MACHINE.jsonl to its folder. Returns the exit code: 0 if it holds.

    Raises BadInput if it is not an entry, or breaks a rule.
    """
    entry = records.read_entry(options.entry)
    record, naive = records.before(entry), records.entries()[0]
    contestants = {each.name: each for each in ([] if options.quick else [naive]) + [record, entry]}
    print(tables.wrapped(plan(contestants, FEW if options.quick else options.seeds)), flush=True)
    task = load_config([str(path) for path in naive.configs])
    machine, data = run_alone(machine_facts, task), open_dataset(task)
    seeds = entry.seeds(FEW if options.quick else options.seeds)
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        folder = tempfile.tempdir = str(Path(folder).resolve())  # of the runs, too
        try:
            copies = {name: copy(each, Path(folder, name), data.folder) for name, each in contestants.items()}
            require_same_task(entry, copies[entry.name], task)
            words = {name: [str(path) for path in each.configs] for name, each in contestants.items()}
            conditions = {"machine": machine, "data": data.fingerprint()}
            conditions["code"] = code_hash(next(iter(copies.values())))  # the naive loop's, which has no patch
            conditions["entries"] = {name: each.digest for name, each in contestants.items()}
            path = Path(folder if options.quick else entry.folder, f"{machine_name(machine)}.jsonl")
            with Runs(path, records.CHECK, conditions, {"commit": commit()}) as runs:
                require_seeded(entry, copies[entry.name], words[entry.name])
                run_in_turns(entry, copies, words, seeds, data, machine["threads"], runs)
                results = records.results_of(conditions, runs)
        finally:
            tempfile.tempdir = None
    if options.quick:
        print(f"{entry.name} keeps the rules, as far as a machine can see. {records.compared(results, record, entry)}")
        return 0
    text, holds = records.verdict(results)
    print(f"{tables.texts({entry.name: records.figures(entry, results)}, tables.plain)}\n\n{entry.name} {text}")
    return int(not holds)


def plan(contestants, n_seeds):
    """Says what a check will do, and how long it will take. contestants: by name, the record and the entry last.

    An entry that has not run yet is taken to be as fast as the record.
    """
    *others, name = contestants
    times, long = records.seconds(), ""
    seconds = [times.get(each, times.get(others[-1], 0.0)) for each in contestants]
    if minutes := (n_seeds * sum(seconds) + seconds[-1]) / 60:
        long = f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"
        long = f", about {long} by the runs in records/"
    return (
        f"{name}: the rules, within minutes; then {n_seeds * len(contestants) + 1} runs on {n_seeds} seeds, beside "
        f"{' and '.join(reversed(others))}{long}. It can be interrupted; the same command "
        "continues."
    )


# -- copies


def copy(entry, folder, data):
    """A copy of the commit that is checked out, with the entry's patch and links to the data. Returns its folder."""
    unpack("HEAD", folder, *PARTS, failed="a check copies a commit of a git checkout")
    if entry.patch:
        require_allowed(entry, folder)
        evaluate = function(folder / "train.py", "evaluate")
        apply_patch(entry, folder)
        if function(folder / "train.py", "evaluate") != evaluate:
            raise BadInput(f"{entry.patch}: it changes evaluate() of train.py; expected the same validation")
    for path in data.iterdir():
        if path.suffix != ".py" and path.is_file():
            (folder / "data" / data.name / path.name).symlink_to(path.resolve())
    return folder


def require_allowed(entry, folder):
    """Raises BadInput if the patch changes a file that an entry may not change, or cannot be read."""
    for line in apply_patch(entry, folder, "--numstat").splitlines():
        if not OPEN.fullmatch(path := line.split("\t")[-1]):
            where = "train.py, model.py, config/, operators/ or nanoladder/ without data/, prepare/ and tokenizer/"
            raise BadInput(f"{entry.patch}: it changes {path}; expected Python files in {where}")


def apply_patch(entry, folder, *words):
    """Runs git apply in a folder that is not a repository. Returns its output. Raises BadInput if it fails."""
    return git("apply", *words, str(entry.patch), failed=f"{entry.patch} does not apply to this commit", folder=folder)


def function(path, name):
    """The syntax tree of a function of a file, as text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [ast.dump(node) for node in tree.body if getattr(node, "name", "") == name]


# -- the rules


def require_same_task(entry, folder, task):
    """Raises BadInput unless the entry's config, read by its own code, has the task's data and the check's seed."""
    command = [sys.executable, "-c", KEYS, *map(str, entry.configs)]
    environment = os.environ | {"PYTHONSAFEPATH": ""}  # which would hide the entry's own code
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = reason_of_exit(done).removeprefix("nanoladder.errors.BadInput: ")
        raise BadInput(f"{entry.name}: its config cannot be read: {why}")
    keys = json.loads(done.stdout)
    for key in race.SAME:
        if keys[key] != getattr(task, key):
            raise BadInput(f"{entry.name}: its config has {key}={keys[key]}; expected the task's {getattr(task, key)}")
    for key in OURS:
        if keys[key] != DEFAULTS[key]:
            raise BadInput(f"{entry.name}: its config sets {key}={keys[key]}; expected none: the check sets the seed")


def require_seeded(entry, folder, words):
    """Raises BadInput if the entry's first weights do not depend on the seed."""
    first, second = (first_weights(entry, folder, words, seed) for seed in entry.seeds(2))
    drawn = [name for name, weight in first.items() if weight.is_floating_point() and weight.min() < weight.max()]
    if drawn and all(torch.equal(first[name], second[name]) for name in drawn):
        raise BadInput(f"{entry.name}: its weights are the same for each seed; expected weights that depend on it")


def first_weights(entry, folder, words, seed):
    """Returns a run's initial weights, {name: weight}, from a checkpoint after one step that changes nothing."""
    with tempfile.TemporaryDirectory() as out_dir:
        more = command_line(STILL | {"seed": seed, "out_dir": f"{out_dir}/run"})
        command = [sys.executable, folder / "train.py", *words, *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BadInput(f"{entry.name}: its first step fails: {reason_of_exit(done)}")
        weights = format.read(Path(out_dir, "run", "last.safetensors"))["model"]
        return {name: weight.clone() for name, weight in weights.items()}


def inspect(entry, folder, words, data):
    """Runs the entry in a copy with the validation tokens in random order, watched. Returns what race.run does.

    folder: the entry's own copy. Raises BadInput if it reads files from outside, or the network.
    """
    with tempfile.TemporaryDirectory() as temporary:
        watched, notes = Path(temporary, "watched"), Path(temporary, "notes.txt")
        shutil.copytree(folder, watched, symlinks=True)
        shuffle_validation(watched / "data" / data.folder.name, data)
        outcome = race.run([str(notes), *words], script=watched / "lab" / "research" / "witness.py")
        folders = readable(entry)
        for path in notes.read_text(errors="replace").splitlines():
            if path.startswith("the network"):
                raise BadInput(f"{entry.name} connects to {path}; expected a run that needs none")
            if not any(Path(path).is_relative_to(folder) for folder in folders):
                raise BadInput(f"{entry.name} reads {path}; expected no file but the data, PyTorch's and its own")
    return outcome


def shuffle_validation(folder, data):
    """Replaces the links to val.bin and meta.json by files with the same tokens in random order."""
    for name in ("val.bin", "meta.json"):
        (folder / name).unlink()
    np.random.default_rng(0).permutation(data.val.tokens).tofile(folder / "val.bin")
    meta = json.loads((data.folder / "meta.json").read_text())
    meta["digests"]["val.bin"] = sample_digest(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps(files.seal(meta)))


def readable(entry):
    """The folders that an entry may read: the check's, its own, those of Python and its packages, and the system's."""
    python = [sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()]
    linked = map(os.path.realpath, python)  # .venv may be a link; its files are opened by either name
    return [tempfile.gettempdir(), str(entry.folder), *python, *linked, *SYSTEM]


def require_honest(entry, inspected, run):
    """Raises BadInput if a run trains otherwise, or ends no better, than with shuffled validation tokens."""
    losses = [[loss for _, loss in each["curve"][:-1]] for each in (inspected, run)]
    if len(losses[0]) != len(losses[1]) or any(abs(a - b) > CLOSE for a, b in zip(*losses, strict=True)):
        raise BadInput(f"{entry.name}: its training losses depend on the validation tokens; expected none in training")
    if not run["bpb"] < inspected["bpb"]:
        raise BadInput(f"{entry.name}: its validation loss is the same for shuffled tokens; expected a true one")


# -- the race


def run_in_turns(entry, copies, words, seeds, data, threads, runs):
    """Takes the missing runs, seed by seed, the entry first.

    The entry's first run is also repeated by inspect. Raises BadInput if it breaks a rule.
    """

    def take(row):
        name, words_of_run = row["name"], [*words[row["name"]], f"--seed={row['seed']}"]
        before = cpu_seconds()
        run = race.run(words_of_run, script=copies[name] / "train.py")
        cores = (cpu_seconds() - before) / run["seconds"]
        if cores > threads + SPARE:
            raise BadInput(f"{name} keeps {cores:.1f} cores busy; expected the naive loop's {threads}")
        if row == wanted[0]:
            require_honest(entry, inspect(entry, copies[name], words_of_run, data), run)
        del run["curve"]
        return run

    wanted = [{"name": name, "seed": seed} for seed in seeds for name in reversed(copies)]
    list(runs.take(lambda: wanted, take))


def cpu_seconds():
    """CPU time, in seconds, of this process's children that have ended."""
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
