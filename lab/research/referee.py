"""Checks an entry of a race: python ladder.py check records/RACE/NAME [--seeds=5] [--quick]

First come the rules that a machine can check: files and keys that an entry may not change, and weights that ignore the
seed. Then the entry, the record before it and the naive loop train in turns, on seeds derived from the entry's digest.
A quick check leaves out the naive loop, which takes most of the time.

No contestant is believed. Each of its commands is a Session in a fresh copy of the commit that is checked out, the
entry's with its patch, in which training tokens stand in for the validation split. The check evaluates the final
weights itself: a process with the contestant's code answers windows of tokens with logits (serve.py), which are
normalized here. A second one gets the windows with other tokens from random places on: no loss before may change.
"""

import dataclasses
import json
import re
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from lab.measure import tables
from lab.measure.cli import command_line
from lab.measure.git import commit, git, unpack
from lab.measure.launch import run_alone
from lab.measure.machine import machine_name
from lab.measure.measurements import machine_facts
from lab.measure.results import code_hash
from lab.measure.runs import Runs
from lab.research import records
from lab.research.race import SAME
from lab.research.records_report import figures
from lab.research.session import Session
from model import IGNORE
from nanoladder import files
from nanoladder.checkpoint import format
from nanoladder.config import DEFAULTS
from nanoladder.data import ValidationBatches, open_dataset
from nanoladder.entry import end_on_signals
from nanoladder.errors import BadInput
from nanoladder.prepare.meta import sample_digest
from nanoladder.run import load_config
from nanoladder.run.metrics import read_metrics

PARTS = [":(glob)*.py", "config", "data", "lab", "nanoladder", "operators"]  # of the repository, that a copy has
OPEN = re.compile(  # to a patch
    r"(train|model)\.py|config/\w+\.py|operators/\w+\.py|nanoladder/(?!(?:data|prepare|tokenizer)/)[\w/]+\.py"
)
CONFIGS = "entry"  # folder of a copy, for the entry's config files
FEW = 2  # seeds of a quick check
STILL = {"max_steps": 1, "learning_rate": 1e-30, "min_lr": 1e-30, "warmup_steps": 0}
STILL |= {"lr_decay_steps": 0, "eval_interval": 0, "save_interval": 1, "compile": False}
SAVED = {"save_interval": 10**9}  # at the end
CLOSE = 0.02  # nats between two evaluations of the same weights, one of them perhaps in half precision
CAUSAL = 1e-3  # nats
SPARE = 0.5  # cores beyond the naive loop's threads, for the loader
BESIDE = 20  # seconds, about, that a run takes besides: its weights are evaluated twice, each time by a new process


def check(options: Namespace) -> int:
    """Checks an entry, prints the verdict and writes MACHINE.jsonl to its folder. Returns the exit code: 0 if it holds.

    Raises BadInput if it is not an entry, or breaks a rule.
    """
    entry = records.read_entry(options.entry)
    race, record = entry.race, records.before(entry)
    naive = race.entries[0]
    contestants = [*([] if options.quick else [naive]), record, entry]
    seeds = entry.seeds(FEW if options.quick else options.seeds)
    print(tables.wrapped(plan([each.name for each in contestants], len(seeds), records.seconds(race))), flush=True)
    task = load_config([str(path) for path in naive.configs])
    machine, data = run_alone(machine_facts, task), open_dataset(task)
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        copies = {each.name: copy(each, Path(folder).resolve() / each.name, data) for each in contestants}
        conditions = {"machine": machine, "data": data.fingerprint()}
        conditions["code"] = code_hash(copies[contestants[0].name])  # the naive loop's, which has no patch
        conditions["entries"] = {each.name: each.digest for each in contestants}
        conditions["target"], counted = race.target, {"name": race.counted, "what": records.COUNTED}
        require_rules(copies[entry.name], entry.seeds(2), task)
        path = Path(folder if options.quick else entry.folder, f"{machine_name(machine)}.jsonl")
        with Runs(path, records.CHECK, conditions, {"commit": commit()}) as runs:
            if not runs.figures(counted):
                runs.put(counted, records.count_tokens(data, task, race.counted))
            judge = Judge(task, data, machine["threads"])
            wanted = [{"name": name, "seed": seed} for seed in seeds for name in reversed(copies)]
            for run in runs.take(lambda: wanted, lambda row: judge.run(copies[row["name"]], row["seed"])):
                tqdm.write("{name}, seed {seed}: {seconds} s, {bpb:.4f} bits per byte".format(**run.row, **run.figures))
            results = records.results_of(conditions, runs)
    if options.quick:
        print(f"{entry.name} keeps the rules, as far as a machine can see. {records.compared(results, record, entry)}")
        return 0
    text, holds = records.verdict(results)
    print(f"{tables.texts({entry.name: figures(entry, results)}, tables.plain)}\n\n{entry.name} {text}")
    return int(not holds)


def plan(contestants, n_seeds, times):
    """Says what a check will do, and how long it will take. contestants: by name, the record and the entry last.

    times: {name: seconds of a run}. An entry that has not run yet is taken to be as fast as the record.
    """
    (*others, name), long = contestants, ""
    seconds = [times.get(each, times.get(others[-1], 0.0)) for each in contestants]
    if sum(seconds):
        minutes = n_seeds * (sum(seconds) + BESIDE * len(contestants)) / 60
        long = f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"
        long = f", about {long} by the runs in records/"
    return (
        f"{name}: the rules, within a minute; then {n_seeds * len(contestants)} runs on {n_seeds} seeds, beside "
        f"{' and '.join(reversed(others))}{long}. It can be interrupted; the same command "
        "continues."
    )


# -- copies


def copy(entry, folder, data):
    """Fills a folder with the commit that is checked out, the entry's patch and config files, and the data."""
    unpack("HEAD", folder, *PARTS, failed="a check copies a commit of a git checkout")
    if entry.patch:
        before = closed(folder)
        git("apply", str(entry.patch), failed=f"{entry.patch} does not apply to this commit", folder=folder)
        if changed := before.items() ^ closed(folder).items():
            where = "train.py, model.py, config/, operators/ or nanoladder/ without data/, prepare/ and tokenizer/"
            raise BadInput(f"{entry.patch}: it changes {min(changed)[0]}; expected Python files in {where}")
    (folder / CONFIGS).mkdir()
    for path in entry.configs:
        shutil.copy(path, folder / CONFIGS)
    for path in data.folder.iterdir():
        if path.suffix != ".py" and path.is_file():
            (folder / "data" / data.folder.name / path.name).symlink_to(path.resolve())
    hide_validation(folder / "data" / data.folder.name, data)
    return folder


def closed(folder):
    """{path: contents} of the files of a copy that a patch may not change."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not OPEN.fullmatch(name)}


def hide_validation(folder, data):
    """Replaces the links to val.bin and meta.json by files whose validation tokens are training tokens."""
    for name in ("val.bin", "meta.json"):
        (folder / name).unlink()
    data.train.tokens[: len(data.val.tokens)].tofile(folder / "val.bin")
    meta = json.loads((data.folder / "meta.json").read_text())
    meta["digests"]["val.bin"] = sample_digest(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps(files.seal(meta)))


# -- the rules


def train(copy, **keys):
    """A Session in which a contestant trains, to out_dir=run, with these keys on top of its config."""
    configs = sorted(f"{CONFIGS}/{path.name}" for path in (copy / CONFIGS).iterdir())
    return Session(copy, "train.py", *configs, *command_line(keys | {"out_dir": "run"}))


def require_rules(copy, seeds, task):
    """Raises BadInput unless an entry trains on the task's data, from weights that depend on the seed.

    copy: the entry's. Both are read from checkpoints, of two seeds, after one step that changes nothing.
    """
    states = []
    for seed in seeds:
        with train(copy, **STILL, seed=seed) as session:
            session.finish("its first step")
            states.append(format.read(session.folder / "run" / "last.safetensors"))
    config, (first, second) = states[0]["config"], (state["model"] for state in states)
    for key, expected in {**{key: getattr(task, key) for key in SAME}, "init_from": DEFAULTS["init_from"]}.items():
        if config[key] != expected:
            raise BadInput(f"{copy.name}: its config has {key}={config[key]}; expected the task's {expected}")
    drawn = [name for name, weight in first.items() if weight.is_floating_point() and weight.min() < weight.max()]
    if drawn and all(torch.equal(first[name], second[name]) for name in drawn):
        raise BadInput(f"{copy.name}: its weights are the same for each seed; expected weights that depend on it")


class Judge:
    """Trains contestants and evaluates their final weights. threads: the naive loop's."""

    def __init__(self, task, data, threads):
        self.task, self.data, self.threads = task, data, threads

    def run(self, copy, seed):
        """A run's seconds, CPU seconds, tokens, and loss in nats per token and bits per byte.

        Raises BadInput if it breaks a rule: more cores, another validation, a model that is not causal.
        """
        weights = copy.with_suffix(".safetensors")
        with train(copy, **SAVED, seed=seed) as session:
            figures = session.finish("its run")
            row = (read_metrics(session.folder / "run" / "metrics.jsonl") or [{}])[-1]
            (session.folder / "run" / "last.safetensors").rename(weights)
        if (cores := figures["cpu_seconds"] / figures["seconds"]) > self.threads + SPARE:
            raise BadInput(f"{copy.name} keeps {cores:.1f} cores busy; expected the naive loop's {self.threads}")
        loss, of_decoys = self.evaluate(copy, weights)
        if not abs((own := row.get("val_loss", np.nan)) - of_decoys) < CLOSE:
            raise BadInput(f"{copy.name} ends with val_loss={own}, its weights with {of_decoys:.4f}; expected the same")
        return figures | {"tokens": row.get("tokens"), "loss": loss, "bpb": loss * self.data.bits_per_nat}

    def evaluate(self, copy, weights):
        """Mean losses of weights, in nats: on the task's windows, and on those that the run could see."""
        folder = copy / "data" / self.data.folder.name
        splits = self.data.val, open_dataset(dataclasses.replace(self.task, dataset=str(folder))).val
        read = [split.read(ValidationBatches(split, self.task).chosen) for split in splits]
        (inputs, targets), (n, T) = read[0], read[0][0].shape
        losses = self.losses(copy, weights, *map(np.concatenate, zip(*read, strict=True)))
        random = np.random.default_rng()  # that no contestant foresees
        kept = np.arange(T) < random.integers(1, T, (n, 1))  # (n, T): a random number of each window's first tokens
        changed = np.where(kept, inputs, random.choice(inputs.ravel(), inputs.shape))
        change = np.abs(self.losses(copy, weights, changed, targets) - losses[:n])[kept].max()
        if not change < CAUSAL:
            raise BadInput(f"{copy.name}: later tokens change a loss by {change:.2g} nats; expected a causal model")
        return [float(part[of != IGNORE].mean()) for part, (_, of) in zip(np.split(losses, [n]), read, strict=True)]

    def losses(self, copy, weights, inputs, targets):
        """Losses of a contestant's model, in nats, (n, T) float64. inputs, targets: int64 (n, T).

        At each position, the probabilities of all token ids sum to one. Raises BadInput if a loss is not finite.
        """
        T, V, losses = inputs.shape[1], self.data.vocab_size, []
        with Session(copy, "-m", "lab.research.serve", weights, str(T), str(V), asked=True) as session:
            for window, of in zip(inputs, torch.from_numpy(targets), strict=True):
                answer = session.ask(window.tobytes(), 4 * T * V)
                if len(answer) < 4 * T * V:
                    session.finish("its model")
                    raise BadInput(f"{copy.name}: its model ends early; expected logits of {V} token ids")
                logits = torch.frombuffer(bytearray(answer), dtype=torch.float32).view(T, V).double()
                losses.append(F.cross_entropy(logits, of, reduction="none", ignore_index=IGNORE))
                if not losses[-1].isfinite().all():
                    raise BadInput(f"{copy.name}: a loss of its model is not finite; expected a distribution")
        return torch.stack(losses).numpy()
