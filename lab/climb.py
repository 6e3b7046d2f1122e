"""Measures what each stage of the ladder is worth on this machine: python profile.py config/x.py [options]

Every figure comes from train.py's own train_step on real batches, in a process of its own (measure.py), one process
at a time. A row's first process trains on the batches that naive trained on, keeps the losses, counts the bytes of
all tensors and looks where the time goes; the others time it. They take turns, row after row, so that a drift of
the machine hits all alike. Started by torchrun, it measures how the config scales up to that many processes. What an
optimizer is worth shows in whole runs only: --mode=optimizers trains them, a process each, before the rounds.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from lab import compare, pictures, plan, predict, summary, tables
from lab.results import FORMAT_VERSION, ROOT, code_hash, commit, machine_name, read_results, write_results
from nanoladder.config import load_config
from nanoladder.data.batches import open_dataset
from nanoladder.errors import BadInput

OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


def main(argv):
    options, config_argv = plan.parse(argv)
    if options.compare:
        print(compare.compare(*(read_results(path) for path in options.compare)))
    elif options.fit:
        print(prediction(options, config_argv))
    elif options.rank == 0:  # of torchrun's processes the first measures, in processes of its own
        climb(options, config_argv)


def prediction(options, config_argv):
    """The text of --fit: what the run costs, and the memory of each stage on the device that the config names."""
    config = load_config(config_argv)
    words = list(config_argv)
    if not config.vocab_size:
        vocab_size = open_dataset(config.dataset, 0, config.context_length)[0]["vocab_size"]
        words.append(f"--vocab_size={vocab_size}")
    config = load_config(words)
    rows = [(stage, load_config([*words, f"--stage={stage}"])) for stage in options.stages if not config.stage]
    rows.append((config.stage or "as configured", config))
    return predict.report(
        config,
        rows,
        config.device.partition(":")[0].replace("auto", "cuda"),
        options.memory_gb,
        options.mfu,
        options.peak_tflops * 1e12,
        options.world_size,
    )


def climb(options, config_argv):
    """Measures every row that results.json does not hold yet, and writes it after each process."""

    folder, results = open_results(options, config_argv)
    rows = plan.plan(options, config_argv)
    part = open_mode(options, config_argv, folder, results, rows)
    threads = max(1, results["machine"]["threads"] // options.processes)
    with tqdm(tasks(options, rows), unit="process") as bar:
        for name, what, count in bar:
            bar.set_postfix_str(f"{name or 'the machine'}, {what}")
            row = part["rows"][name] if name else part
            done = row.setdefault(what, [])
            if len(done) >= count or row.get("note"):
                continue
            words = [*config_argv, *row.get("words", [])]
            if what == "curve":
                tried = summary.factors(options.grid, [curve["val_loss"] for curve in done])
                if len(done) == len(tried):  # the best lies between others
                    continue
                words += plan.schedule(options, config_argv, tried[len(done)])
            if what in ("time", "silent"):
                words.append(f"--steps={options.steps}")
            if options.mode == "scaling" and name:  # a process has as many threads alone as beside the others
                words.append(f"--threads={threads}")
            if options.trace and what == "examine":
                words.append(f"--trace={Path(folder, 'traces', name.replace(' ', '_'))}")
            try:
                done.append(run_alone(what, words, int(name) if options.mode == "scaling" and name else 1))
            except RuntimeError as error:
                row["note"] = str(error)
                bar.write(f"{name or 'the machine'}, {what}: {error}")
            write_results(folder, results)
    pictures.draw(results, options.mode, folder / f"{options.mode}.png")
    print(tables.table(results, options.mode))
    print(f"written: {folder}/results.json, table.md and {options.mode}.png")


def open_results(options, config_argv):
    """The folder of the results, and what it holds. Raises BadInput if that was measured under other conditions."""
    config = load_config(config_argv)
    _, *splits = open_dataset(config.dataset, config.vocab_size, config.context_length)
    conditions = {
        "machine": run_alone("machine", config_argv),
        "config": config_argv,
        "keys": dataclasses.asdict(config),
        "data": [split.fingerprint() for split in splits],
        "steps": options.steps,
        "code": code_hash(),
    }
    names = "-".join(Path(word).stem for word in config_argv if word.endswith(".py"))
    folder = Path(options.out_dir or Path("results", machine_name(conditions["machine"]), names or "defaults"))
    path = folder / "results.json"
    if not path.exists():
        return folder, {"format_version": FORMAT_VERSION, "commit": commit(), **conditions, "modes": {}}
    results = read_results(path)
    if different := [key for key in conditions if results[key] != conditions[key]]:
        what = " and ".join(different)
        raise BadInput(f"{path} was measured under another {what}; choose another --out_dir, or remove it")
    return folder, results


def open_mode(options, config_argv, folder, results, rows):
    """The part of the results of the mode that is measured, with its rows in it."""
    runs = {"train_steps": options.train_steps, "grid": options.grid} if options.mode == "optimizers" else {}
    part = results["modes"].setdefault(options.mode, {**runs, "limits": [], "rows": {}})
    part.pop("note", None)
    if different := [key for key in runs if part[key] != runs[key]]:
        what = " and ".join(f"--{key}" for key in different)
        raise BadInput(f"{folder} was measured with another {what}; choose another --out_dir, or remove it")
    if part["rows"] and {name: row["words"] for name, row in part["rows"].items()} != rows:
        raise BadInput(f"{folder} holds other rows of --mode={options.mode}; choose another --out_dir, or remove it")
    reasons = plan.not_applicable(rows, options.mode, config_argv)
    for name, words in rows.items():
        part["rows"].setdefault(name, {"words": words})["note"] = reasons.get(name)  # what failed is tried again
    try:
        write_results(folder, results)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error}); choose another --out_dir") from None
    return part


def tasks(options, rows):
    """(row, what, how many times by then): correctness first, then rounds, in each the machine's own limits too.

    Every other round goes backwards: no row is always the first, or always behind the same one.
    """
    scaling = options.mode == "scaling"
    found = [] if scaling else [(name, "examine", 1) for name in rows]
    if options.mode == "optimizers":
        most = len(options.grid) + summary.BEYOND
        found += [(name, "curve", count) for name in rows for count in range(1, 1 + most)]
    for count in range(1, options.repeats + 1):
        found.append((None, "limits", count))
        for name in list(rows) if count % 2 else reversed(rows):
            found.append((name, "time", count))
            if scaling and options.replicated and name != "1":
                found.append((name, "silent", count))
    return found


def run_alone(what, words, processes=1):
    """Measures something in a new process, or in several. Raises RuntimeError with why if it fails."""
    command = ["-m", "lab.measure", what, *words]
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *command]
    environment = {key: value for key, value in os.environ.items() if not OF_TORCHRUN.fullmatch(key)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if process.returncode == -9 or "exitcode  : -9" in process.stderr:
        raise RuntimeError("killed by the system, most likely out of memory")
    said = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    reasons = [line for line in said if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    raise RuntimeError((reasons or said)[-1])
