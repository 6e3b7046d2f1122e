"""Measures this loop beside those that people use: python profile.py config/x.py --mode=peers [--nanogpt=PATH]

Every row trains from the same weights on the same batches with the same hyperparameters, in processes of its own
(task.py). Rows take turns, round after round.
"""

import hashlib
import math
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from lab import tables
from lab.launch import run_alone
from lab.measure import WARMUP
from lab.results import default_folder, resume, write
from lab.summary import speedup, timing
from lab.tuned import config_path
from nanoladder.errors import BadInput
from nanoladder.run import load_config

NEEDED = {"huggingface": ["transformers", "accelerate"], "lightning": ["lightning"]}  # peer: its packages
INSTALL = "pip install -r requirements-peers.txt"
CHECKOUT = ("train.py", "model.py", "configurator.py")  # of nanoGPT
CODE = ["lab/peers/*.py"]  # the figures depend on it
ALIKE = {  # key: its only value with which every peer trains the same
    **{"stage": "", "optimizer": "adamw", "freeze": "none", "dropout": 0.0},
    **{"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "shard": "none"},
}


def compare(options, config_words, conditions):
    """Measures what peers.json does not hold yet, and writes it, and peers.md, after each process.

    conditions: function that returns those of the results.
    """
    config = load_config(config_words)
    require_comparable(config)
    checkout = options.nanogpt and require_checkout(options.nanogpt)
    reasons = missing(checkout)
    if none_is_here(reasons):
        raise BadInput(f"--mode=peers: no peer can be measured; expected {INSTALL}, or --nanogpt=PATH of a checkout")
    conditions = conditions()
    folder = Path(options.out_dir or default_folder(conditions))
    loops = rows(config_path(conditions["machine"], options.given, options.tuned_dir), checkout)
    results = resume(folder / "peers.json", conditions, {"rows": dict}) or {**conditions, "rows": {}}
    for name, (peer, words) in loops.items():
        own = {"peer": peer, "words": words, "version": version(peer, words, checkout)}
        if any(results["rows"].get(name, {}).get(key) != own[key] for key in own):
            results["rows"][name] = {**own, "time": []}
        results["rows"][name]["note"] = reasons.get(peer)
    write(folder, {"peers.json": results, "peers.md": table(results)})
    # Every second round goes backwards, as in the ladder
    turns = [(n, name) for n in range(options.repeats) for name in (reversed(loops) if n % 2 else loops)]
    with tqdm(turns, unit="process") as bar:
        for n, name in bar:
            row = results["rows"][name]
            bar.set_postfix_str(name)
            if len(row["time"]) > n or row["note"]:
                continue
            words = [f"--peer={row['peer']}", f"--steps={options.steps}", *config_words, *row["words"]]  # tuned: last
            try:
                row["time"].append(run_alone("time", words, module="lab.peers.task"))
            except RuntimeError as error:
                row["note"] = str(error).removeprefix("error: ")
                bar.write(f"{name}: {row['note']}")
            write(folder, {"peers.json": results, "peers.md": table(results)})
    print(f"{brief(results)}\n\nwritten: {folder}/peers.md with all figures, and peers.json")


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
    if absent := [name for name in CHECKOUT if not Path(path, name).is_file()]:
        raise BadInput(
            f"--nanogpt={path}: no {absent[0]} there; expected a checkout of https://github.com/karpathy/nanoGPT"
        )
    return Path(path).resolve()


def missing(checkout):
    """{peer: the reason why it cannot be measured}."""
    reasons = {} if checkout else {"nanogpt": "needs a checkout: --nanogpt=PATH"}
    for peer, packages in NEEDED.items():
        if absent := [name for name in packages if find_spec(name) is None]:
            reasons[peer] = f"needs {' and '.join(absent)}: {INSTALL}"
    return reasons


def none_is_here(reasons):
    """True if these reasons, of missing(), leave no peer that can be measured."""
    return len(reasons) > len(NEEDED)


def rows(tuned, checkout):
    """{row: (its peer, the words that it adds)}. tuned: where --mode=tune writes the config of this machine."""
    found = {"naive": ("ours", ["--stage=naive"]), "finished": ("ours", [])}
    if tuned.exists():
        found["tuned"] = "ours", [str(tuned), "--micro_batch_size=0"]  # a batch at once, as all
    nanogpt = [f"--nanogpt={checkout}"] if checkout else []
    peers = ("nanoGPT", "nanogpt", nanogpt), ("Hugging Face Trainer", "huggingface", []), ("Lightning", "lightning", [])
    for name, peer, words in peers:
        found |= {name: (peer, words), f"{name}, compiled": (peer, [*words, "--best"])}
    return found


def version(peer, words, checkout):
    """The version of a peer in words, empty if it is not here; of ours, that of a tuned config."""
    if peer in NEEDED:
        return ", ".join(f"{name} {metadata.version(name)}" for name in NEEDED[peer] if find_spec(name))
    if peer == "nanogpt":
        return f"nanoGPT {digest(checkout / name for name in CHECKOUT)}" if checkout else ""
    return "".join(f"tuned {digest([Path(word)])}" for word in words if word.endswith(".py"))


def digest(paths):
    """Eight hexadecimal digits of the contents of files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


# -- the report


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
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "IQR": lambda row: tables.milliseconds(row["iqr"], row["seconds"]),
        f"loss of step {WARMUP + results['steps']}": lambda row: f"{row['loss']:.4f}",
        "losses differ from naive's by": lambda row: f"{row['gap']:.1g}" if math.isfinite(row["gap"]) else "diverged",
        "first step s (later processes)": tables.first_steps,
        "dtype": lambda row: row["dtype"],
        "setting": lambda row: "its defaults" if row["setting"] == "" else row["setting"] or "",
    }


def brief(results):
    """The rows for a terminal: the three fastest, then a table."""
    rows = summarize(results)
    timed = sorted((row for row in rows if "seconds" in row), key=lambda row: row["seconds"])
    ranking = ", ".join(f"{row['name']} {tables.milliseconds(row['seconds'])} ms" for row in timed[:3])
    return tables.on_terminal(f"The fastest: {ranking}.", columns(rows, results), rows)


def table(results):
    """The measurements in Markdown: the conditions, the rows, the versions, and what is the same for all of them."""
    found, keys = summarize(results), results["keys"]
    versions = dict.fromkeys(row["version"] for row in results["rows"].values() if row["version"])
    conditions = [tables.machine_in_words(results["machine"]), f"torch {results['machine']['torch']}", *versions]
    return "\n\n".join(
        [
            f"## peers: `{' '.join(results['config'])}`",
            f"{'; '.join(conditions)}. A step is {keys['batch_size']} × {keys['context_length']} tokens; medians over "
            f"the processes, each of which times at least {results['steps']} steps after {WARMUP}.",
            tables.markdown(columns(found, results), found),
            "All rows start from the same weights and train on the same batches, with AdamW at a constant learning "
            f"rate of {keys['learning_rate']:g}; the time includes loading the batches. Against finished stands the "
            "median of the ratios within the rounds, and their range.",
        ]
    )
