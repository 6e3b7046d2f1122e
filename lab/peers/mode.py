"""Measures this loop beside those that people use: python profile.py config/x.py --mode=peers [--nanogpt=PATH]

Every row trains from the same weights on the same batches with the same hyperparameters, in processes of its own
(worker.py). On a CPU, one counts the bytes of its tensors. The others time it; rows take turns, round after round.
"""

import hashlib
import math
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lab import pictures, tables
from lab.launch import run_alone
from lab.measure import WARMUP
from lab.results import commit, default_folder, resume, write
from lab.summary import Row, speedup, timing
from lab.tuned import config_path
from nanoladder.errors import BadInput
from nanoladder.run import load_config

NEEDED = {"transformers": ["transformers", "accelerate"], "lightning": ["lightning"]}  # peer: its packages
INSTALL = "pip install -r requirements-peers.txt"
CODE = ["lab/peers/*.py"]  # the figures depend on it
ALIKE = {  # key: its only value with which every peer trains the same
    **{"stage": "", "optimizer": "adamw", "freeze": "none", "dropout": 0.0},
    **{"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "shard": "none"},
}


class Loop(NamedTuple):
    """A row: a peer at its defaults or at its best, and words that are added to the config's."""

    peer: str
    best: bool = False
    words: tuple = ()

    def command(self, checkout):
        """The words of worker.py for it."""
        nanogpt = [f"--nanogpt={checkout}"] if self.peer == "nanogpt" else []
        return [f"--peer={self.peer}", *["--best"] * self.best, *nanogpt, *self.words]

    def settings(self):
        """The contents of the config files among its words."""
        return [Path(word).read_text(encoding="utf-8") for word in self.words if word.endswith(".py")]


def compare(options, config_words, conditions):
    """Measures what peers.json does not hold yet, and writes it after each process, then peers.md and peers.png.

    conditions: function that returns those of the results.
    """
    config = load_config(config_words)
    require_comparable(config)
    checkout = options.nanogpt and require_checkout(options.nanogpt)
    reasons = missing(checkout)
    if none_is_here(reasons):
        raise BadInput(f"--mode=peers: no peer can be measured; expected {INSTALL}, or --nanogpt=PATH of a checkout")
    conditions = conditions()
    folder, machine = Path(options.out_dir or default_folder(conditions)), conditions["machine"]
    tuned = config_path(machine, options.given, options.tuned_dir)
    loops = rows(tuned if tuned.exists() else None)
    results = resume(folder / "peers.json", conditions, {"rows": dict}) or {**conditions, "rows": {}}
    for name, loop in loops.items():
        own = {"words": loop.command(checkout), "version": version(loop.peer, checkout), "settings": loop.settings()}
        row = results["rows"].get(name, {})
        compared = ["words", "settings"] if loop.peer == "nanoladder" else own  # its code is among the conditions
        if any(row.get(key) != own[key] for key in compared):
            row = results["rows"][name] = {"peer": loop.peer, **own}
        row["note"] = reasons.get(loop.peer)
    write(folder, {"peers.json": results, "peers.md": table(results)})
    with tqdm(tasks(loops, options.repeats, bool(machine["gpu"])), unit="process") as bar:
        for name, measurement, count in bar:
            row = results["rows"][name]
            bar.set_postfix_str(f"{name}, {measurement}")
            done = row.setdefault(measurement, [])
            if len(done) >= count or row["note"]:
                continue
            words = [*config_words, *row["words"], f"--steps={options.steps}"]  # a tuned config comes last
            try:
                done.append(run_alone(measurement, words, module="lab.peers.worker"))
            except RuntimeError as error:
                row["note"] = str(error).removeprefix("error: ")
                bar.write(f"{name}, {measurement}: {row['note']}")
            write(folder, {"peers.json": results, "peers.md": table(results)})
    if drawn := [row for row in summarize(results) if "seconds" in row and "peak" in row]:
        title = pictures.heading("peers", results["config"], tables.device(results))
        pictures.draw_peers(drawn, title, folder / "peers.png")
    print(brief(results))
    print(f"\nwritten: {folder}/peers.md with all figures, peers.json and peers.png")


# -- the rows


def require_comparable(config):
    """Raises BadInput for a config with which not every peer trains the same."""
    for key, value in ALIKE.items():
        if (found := getattr(config, key)) != value:
            expected = f"--{key}={value}" if value != "" else f"no {key}"
            raise BadInput(f"{key}={found}: not every peer can train so; expected {expected}")
    if config.micro_batch_size % config.batch_size:
        raise BadInput(
            f"micro_batch_size={config.micro_batch_size}: every peer takes a batch at once; expected "
            f"--batch_size={config.micro_batch_size}"
        )
    if config.device.partition(":")[2]:
        raise BadInput(f"device={config.device}: expected --device=cuda, and the GPU's number in CUDA_VISIBLE_DEVICES")


def require_checkout(path):
    """The absolute path of a checkout of nanoGPT. Raises BadInput if it is none."""
    if absent := [name for name in ("train.py", "model.py", "configurator.py") if not Path(path, name).is_file()]:
        raise BadInput(
            f"--nanogpt={path}: no {absent[0]} there; expected a checkout of https://github.com/karpathy/nanoGPT"
        )
    return Path(path).resolve()


def missing(checkout):
    """{peer: the reason why it cannot be measured}, for all but ours."""
    reasons = {}
    for peer, packages in NEEDED.items():
        if absent := [name for name in packages if find_spec(name) is None]:
            reasons[peer] = f"needs {' and '.join(absent)}: {INSTALL}"
    if not checkout:
        reasons["nanogpt"] = "needs a checkout: --nanogpt=PATH"
    return reasons


def none_is_here(reasons):
    """True if these reasons, of missing(), leave no peer that can be measured."""
    return len(reasons) > len(NEEDED)


def rows(tuned):
    """{row: its Loop}. tuned: path of the config that --mode=tune has found for this machine, or None."""
    ours = {"naive": Loop("nanoladder", words=("--stage=naive",)), "finished": Loop("nanoladder")}
    if tuned:
        ours["tuned"] = Loop("nanoladder", words=(str(tuned), "--micro_batch_size=0"))  # a batch at once, as all
    return ours | {
        "nanoGPT": Loop("nanogpt"),
        "nanoGPT, compiled": Loop("nanogpt", best=True),
        "Hugging Face Trainer": Loop("transformers"),
        "Hugging Face Trainer, compiled": Loop("transformers", best=True),
        "Lightning": Loop("lightning"),
        "Lightning, compiled": Loop("lightning", best=True),
    }


def version(peer, checkout):
    """The version of a peer in words; None of one that is not here."""
    if peer == "nanoladder":
        return f"nanoladder {commit()}"
    if peer == "nanogpt":
        return checkout and f"nanoGPT {commit(checkout) if (checkout / '.git').exists() else ''} ({digest(checkout)})"
    installed = [name for name in NEEDED[peer] if find_spec(name)]
    return ", ".join(f"{name} {metadata.version(name)}" for name in installed)


def digest(checkout):
    """Eight hexadecimal digits of nanoGPT's code."""
    code = b"".join((checkout / name).read_bytes() for name in ("train.py", "model.py", "configurator.py"))
    return hashlib.sha256(code).hexdigest()[:8]


def tasks(loops, repeats, on_gpu):
    """[(row, measurement, how many of them it has afterwards)]; every second round goes backwards, as in the ladder."""
    found = [(name, "memory", 1) for name in loops if not on_gpu]  # which knows its peak by itself
    for count in range(1, repeats + 1):
        found += [(name, "time", count) for name in (loops if count % 2 else reversed(loops))]
    return found


# -- the report


def summarize(results):
    """A summary.Row for each row: its figures, as far as they were measured."""
    found, naive = [], results["rows"]["naive"].get("time")
    for name, measured in results["rows"].items():
        row = Row(name=name, note=measured["note"], peer=measured["peer"], threads=None, dtype="", setting=None)
        row |= {"dropout": 0.0, "another_update": False}  # as require_comparable demands; report.py asks
        if timed := measured.get("time"):
            losses = timed[0]["losses"]
            row |= timing(timed) | {key: timed[0][key] for key in ("dtype", "setting", "threads")}
            row["loss"] = losses[-1]
            if naive:
                row["gap"] = max(gap(*pair) for pair in zip(losses, naive[0]["losses"], strict=True))
            if measured["peer"] == "nanoladder":
                row["setting"] = " ".join(measured["words"][1:]) or "as configured"
        figures = [*measured.get("memory", []), *measured.get("time", [])]
        if figures and figures[0].get("peak"):
            row["peak"] = figures[0]["peak"]
        found.append(row)
    return found


def gap(a, b):
    """The difference of two losses; infinite if one is not finite."""
    return abs(a - b) if math.isfinite(a - b) else math.inf


def columns(rows, results):
    """{heading: row -> text} of the table, the most important first."""
    finished = next(row for row in rows if row["name"] == "finished")
    return {
        "ms/step": lambda row: tables.milliseconds(row["seconds"]),
        "time against finished": lambda row: speedup(row, finished),
        "tensors GB": lambda row: f"{row['peak'] / 1e9:.3f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "IQR": lambda row: tables.milliseconds(row["iqr"], row["seconds"]),
        "resident GB": lambda row: f"{row['resident'] / 1e9:.2f}",
        f"loss of step {WARMUP + results['steps']}": lambda row: f"{row['loss']:.4f}",
        "losses differ from naive's by": lambda row: f"{row['gap']:.1g}" if math.isfinite(row["gap"]) else "diverged",
        "first step s (later processes)": tables.first_steps,
        "dtype": lambda row: row["dtype"],
        "threads": lambda row: "" if row["threads"] in (None, results["machine"]["threads"]) else str(row["threads"]),
        "setting": lambda row: row["setting"] or "its defaults" * (row["setting"] == ""),
    }


def brief(results):
    """The rows for a terminal: the three fastest, then a table."""
    rows = summarize(results)
    timed = sorted((row for row in rows if "seconds" in row), key=lambda row: row["seconds"])
    ranking = ", ".join(f"{row['name']} {tables.milliseconds(row['seconds'])} ms" for row in timed[:3])
    return tables.on_terminal(f"The fastest: {ranking}.", columns(rows, results), rows)


def table(results):
    """The measurements in Markdown: the conditions, the rows, the versions, and what is the same for all of them."""
    found, keys, steps = summarize(results), results["keys"], results["steps"]
    rounds = max((len(row["rounds"]) for row in found if "rounds" in row), default=0)
    versions = dict.fromkeys(row["version"] for row in results["rows"].values() if row["version"])
    return "\n\n".join(
        [
            f"## peers: `{' '.join(results['config'])}`",
            f"{tables.machine_in_words(results['machine'])}; torch {results['machine']['torch']}; "
            f"{'; '.join(versions)}. A step is {keys['batch_size']} × {keys['context_length']} tokens; medians over up "
            f"to {rounds} processes, each of which times at least {steps} steps after {WARMUP}.",
            tables.markdown(columns(found, results), found),
            "All rows start from the same weights and train on the same batches, with AdamW at a constant learning "
            f"rate of {keys['learning_rate']:g}; the time includes loading the batches. Against finished stands the "
            "median of the ratios within the rounds, and their range.",
        ]
    )
