"""Measures this loop beside those that people use: python profile.py config/x.py --mode=peers [--nanogpt=PATH]

Every row trains from the same weights on the same batches with the same hyperparameters, in processes of its own
(task.py). Rows take turns, round after round.
"""

import math
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from lab import plan, tables
from lab.launch import run_alone
from lab.measure import WARMUP
from lab.peers import task
from lab.results import default_folder, resume, write
from lab.summary import speedup, timing
from lab.tuned import config_path
from nanoladder.errors import BadInput
from nanoladder.run import load_config

NEEDED = {"huggingface": ["transformers", "accelerate"], "lightning": ["lightning"]}  # peer: its packages
INSTALL = "pip install -r requirements-peers.txt"
ALIKE = {  # key: its only value with which every peer trains the same
    **{"stage": "", "optimizer": "adamw", "dropout": 0.0},
    **{"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "shard": "none"},
}


def compare(options, config_words, conditions):
    """Measures what peers.json does not hold yet, and writes it, and peers.md, after each process.

    conditions: function that returns those of the results.
    """
    require_comparable(load_config(config_words))
    if options.nanogpt and not Path(options.nanogpt, "train.py").is_file():
        raise BadInput(f"--nanogpt={options.nanogpt}: no train.py there; expected a checkout of karpathy/nanoGPT")
    reasons = missing(options.nanogpt)
    if len(reasons) > len(NEEDED):
        raise BadInput(f"--mode=peers: no peer can be measured; expected {INSTALL}, or --nanogpt=PATH of a checkout")
    packages = [name for names in NEEDED.values() for name in names if find_spec(name)]
    checkout = str(Path(options.nanogpt).resolve()) if options.nanogpt else None
    conditions = conditions() | {"versions": {name: metadata.version(name) for name in packages}, "nanogpt": checkout}
    folder = Path(options.out_dir or default_folder(conditions))
    results = resume(folder / "peers.json", conditions, {"rows": dict}) or {**conditions, "rows": {}}
    loops = rows(config_words, config_path(conditions["machine"], options.given, options.tuned_dir))
    for name, (peer, words, _) in loops.items():
        if results["rows"].get(name, {}).get("words") != words:
            results["rows"][name] = {"peer": peer, "words": words, "time": []}
        results["rows"][name]["note"] = reasons.get(peer)
    # Every second round goes backwards, as in the ladder
    turns = [(n, name) for n in range(options.repeats) for name in (reversed(loops) if n % 2 else loops)]
    for n, name in tqdm(turns, unit="process"):
        row, (peer, words, best) = results["rows"][name], loops[name]
        if len(row["time"]) <= n and not row["note"]:
            try:
                measured = run_alone(task.measure, peer, [*config_words, *words], best, options.steps, checkout)
                row["time"].append(measured)
            except RuntimeError as error:
                row["note"] = str(error)
        write(folder, {"peers.json": results, "peers.md": table(results)})
    print(f"{brief(results)}\n\nwritten: {folder}/peers.md with all figures, and peers.json")


def require_comparable(config):
    """Raises BadInput for a config with which not every peer trains the same."""
    if config.micro_batch_size % config.batch_size:
        raise BadInput(f"micro_batch_size={config.micro_batch_size}: every peer takes a batch at once; expected 0")
    for key, value in ALIKE.items():
        if (given := getattr(config, key)) != value:
            expected = f"--{key}={value}" if value != "" else f"no {key}"
            raise BadInput(f"{key}={given}: not every peer can train so; expected {expected}")


def missing(nanogpt):
    """{peer: the reason why it cannot be measured}. nanogpt: path of a checkout, or None."""
    reasons = {} if nanogpt else {"nanogpt": "needs a checkout: --nanogpt=PATH"}
    for peer, packages in NEEDED.items():
        if absent := [name for name in packages if find_spec(name) is None]:
            reasons[peer] = f"needs {' and '.join(absent)}: {INSTALL}"
    return reasons


def rows(config_words, tuned):
    """{row: (its peer, the words that it adds, if it is at its best)}. tuned: path of the machine's tuned config."""
    found = {"naive": ("ours", ["--stage=naive"], True), "finished": ("ours", [], True)}
    if tuned.exists():
        config = load_config([*config_words, str(tuned), "--micro_batch_size=0"])  # a batch at once, as all
        found["tuned"] = "ours", plan.command_line(plan.changes(config, load_config(config_words))), True
    for name, peer in {"nanoGPT": "nanogpt", "Hugging Face Trainer": "huggingface", "Lightning": "lightning"}.items():
        found |= {name: (peer, [], False), f"{name}, compiled": (peer, [], True)}
    return found


def summarize(results):
    """A dict for each row: its figures, as far as they were measured."""
    found, naive = [], results["rows"]["naive"]["time"]
    for name, measured in results["rows"].items():
        row = {"name": name, "note": measured["note"], "dtype": "", "setting": None}
        row |= {"dropout": 0.0, "another_update": False}  # as require_comparable demands; report.py asks
        if timed := measured.get("time"):
            losses = timed[0]["losses"]
            row |= timing(timed) | {"loss": losses[-1], "dtype": timed[0]["dtype"], "setting": timed[0]["setting"]}
            row["peak"] = timed[0].get("peak") or timed[0]["resident_bytes"]
            if naive:
                gaps = [abs(a - b) for a, b in zip(losses, naive[0]["losses"], strict=True)]
                row["gap"] = max(gap if math.isfinite(gap) else math.inf for gap in gaps)
            if measured["peer"] == "ours":
                row["setting"] = " ".join(measured["words"]) or "as configured"
        found.append(row)
    return found


def columns(rows, results):
    """{heading: row -> text} of the table, the most important first."""
    finished = next(row for row in rows if row["name"] == "finished")
    memory = "tensors" if results["machine"]["gpu"] else "resident"
    return {
        "ms/step": lambda row: tables.milliseconds(row["seconds"]),
        "time against finished": lambda row: speedup(row, finished),
        f"{memory} GB": lambda row: f"{row['peak'] / 1e9:.3f}",
        f"loss of step {WARMUP + results['steps']}": lambda row: f"{row['loss']:.4f}",
        "losses differ from naive's by": lambda row: f"{row['gap']:.1g}" if math.isfinite(row["gap"]) else "diverged",
        "first step s (later processes)": tables.first_steps,
        "dtype": lambda row: row["dtype"],
        "setting": lambda row: "its defaults" if row["setting"] == "" else row["setting"] or "",
    }


def brief(results):
    """The rows for a terminal: the three fastest, then a table."""
    rows = summarize(results)
    fastest = sorted((row for row in rows if "seconds" in row), key=lambda row: row["seconds"])[:3]
    ranking = ", ".join(f"{row['name']} {tables.milliseconds(row['seconds'])} ms" for row in fastest)
    return tables.on_terminal(f"The fastest: {ranking}.", columns(rows, results), rows)


def table(results):
    """The measurements in Markdown: the conditions, the rows, the versions, and what is the same for all of them."""
    figures, keys = summarize(results), results["keys"]
    versions = [f"{name} {version}" for name, version in results["versions"].items()]
    conditions = [tables.machine_in_words(results["machine"]), f"torch {results['machine']['torch']}", *versions]
    return "\n\n".join(
        [
            f"## peers: `{' '.join(results['config'])}`",
            f"{'; '.join(conditions)}. A step is {keys['batch_size']} × {keys['context_length']} tokens; medians over "
            f"the processes, each of which times at least {results['steps']} steps after {WARMUP}.",
            tables.markdown(columns(figures, results), figures),
            "All rows start from the same weights and train on the same batches, with AdamW at a constant learning "
            f"rate of {keys['learning_rate']:g}; the time includes loading the batches. Against finished stands the "
            "median of the ratios within the rounds, and their range.",
        ]
    )
