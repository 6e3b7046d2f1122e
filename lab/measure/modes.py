"""Runs the modes of profile.py. Those defined here measure rows (configs.py) on this machine, round by round.

Every figure comes from train.py's own train_step on real batches, in separate processes (measurements.py), forked from
one that has imported all they need (launch.py). The first process of a row trains on the same batches as the first
row's: it records the losses and counts where memory and time go. Then the rows are timed, in turns (turns.py).
--mode=scaling measures 1 to --processes processes at once; --train takes whole runs and no turns; peers/task.py
measures other loops.
"""

import contextlib
import dataclasses
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from lab.measure import cli, judge, measurements, summary, tables
from lab.measure.configs import (
    AS_CONFIGURED,
    changes_from,
    not_applicable,
    rows_of,
    stage_rows,
    stages_of,
    trains_otherwise,
    varied_rows,
)
from lab.measure.git import commit
from lab.measure.launch import Processes, run_alone, run_together
from lab.measure.machine import machine_in_words
from lab.measure.peers import task
from lab.measure.results import STEPS, code_hash, default_folder, free_folder, results_of, table_of, under, write
from lab.measure.runs import RUNS, Failed, Runs, in_words
from lab.measure.turns import Schedule
from lab.predict import devices, predict
from lab.research import by_loss, race, recipe
from nanoladder.config import apply, parse_arguments
from nanoladder.config.stages import files
from nanoladder.data import open_dataset
from nanoladder.entry import end_on_signals
from nanoladder.errors import BadInput
from nanoladder.machine import choose_device
from nanoladder.run import load_config

FREE = 0.8  # of the free memory is for the processes that are alive
BESIDE, PER_BYTE = 0.5e9, 1.5  # resident bytes of a process beside its tensors, and for each byte of them


def main(argv: list[str]) -> None:
    options, words = cli.parse(argv)
    end_on_signals()
    if options.mode != "predict":
        check_device(load_config(words))
    match options.mode:
        case "predict":
            predict_all(options, words)
        case "judge":
            sys.exit(judge.judge(options, words))
        case "recipe":
            recipe.measure(options, words)
        case "by_loss":
            by_loss.measure(options, words)
        case "race":
            race.race(options, words)
        case _:
            measure_rows(options, words)


def check_device(config):
    """Raises BadInput for a device whose memory and time by kind of work PyTorch does not report."""
    if choose_device(config.device).type == "mps":
        raise BadInput("device=mps cannot be measured; expected --device=cpu, or a machine with CUDA")


def sized(config_words):
    """Returns the config's arguments and, unless they set vocab_size, the dataset's."""
    config = load_config(config_words)
    if config.vocab_size:
        return config_words
    return [*config_words, f"--vocab_size={open_dataset(config).vocab_size}"]


def predict_all(options, config_words):
    """Prints the cost of the run, and the memory and least time of each row; writes them, if there is an out_dir.

    A row is a stage, or with --vary a combination of values.
    """
    try:
        words = sized(config_words)
    except BadInput as error:
        raise BadInput(f"{error}; or, to predict without the data, --vocab_size=NUMBER") from None
    config = load_config(words)
    n, price, memory_gb = options.world_size, options.price_per_hour, options.memory_gb
    stage = parse_arguments(words)[1].get("stage")
    names = options.stages or ([] if stage or options.vary else stages_of(n))
    rows = stage_rows(names, words) | {stage or AS_CONFIGURED: config} | varied_rows(options.vary or [], words)
    kind = config.device.partition(":")[0].replace("auto", "cuda")
    device = device_of(options, kind, words)
    cost = predict.costs(config)
    header = tables.run_in_words(cost, device, config.max_steps, options.mfu, n, price)
    if memory_gb:
        header += f"\nAt the end: the largest micro-batch in {memory_gb:g} GB."
    bar = tqdm(rows.items(), unit="row", leave=False)
    predicted = [predict.predict_row(name, row_config, device, kind, n, memory_gb) for name, row_config in bar]
    columns = (tables.RUN_COLUMNS if options.vary else {}) | tables.predicted_columns(predicted[0], n, price)
    print(tables.on_terminal(header, columns, predicted))
    if not options.out_dir:
        return print("\n--out_dir=FOLDER writes all figures to predict.md")
    table = tables.markdown(columns | tables.TIME_COLUMNS | tables.memory_columns(), predicted)
    text = [f"`{' '.join(config_words)}`", header, tables.limits_in_words(device), table]
    write(Path(options.out_dir), {"predict.md": "\n\n".join(text)})
    print(f"\nwritten: {options.out_dir}/predict.md")


def device_of(options, kind, config_words):
    """The devices.Device for which --mode=predict predicts; if it is the one here, and not named, it is measured."""
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"device={kind}: memory and time are predicted for cpu and cuda; expected one of them")
    if options.gpu and kind != "cuda":
        raise BadInput(f"--gpu={options.gpu} with --device={kind}: expected --device=cuda")
    if options.gpu or (kind == "cuda" and not torch.cuda.is_available()):
        return devices.datasheet(options.gpu or "H100")
    print("measuring this machine …", file=sys.stderr)
    config = load_config(config_words)
    machine, limits = (run_alone(part, config) for part in (measurements.machine_facts, measurements.machine_limits))
    return devices.measured(machine_in_words(machine), [limits])


def measure_rows(options, config_words):
    """Measures what has not been measured yet, and writes the table after each process and round."""
    start_time, words = time.monotonic(), sized(config_words)
    base, rows, mode = load_config(words), rows_of(options, words), cli.part_of_results(options)
    conditions, reasons, planned = conditions_of(options, config_words), not_applicable(rows, options), []
    machine, row_words = conditions["machine"], words_of(rows, base)

    def fits(there, found):
        return under(conditions)(there, found) and words_there(found, mode) in (None, row_words)

    folder = Path(options.out_dir or free_folder(default_folder(conditions), "table.md", STEPS, fits))

    def wanted():
        return [task for task in planned if task.get("name") not in reasons]

    def measure(task):
        name = task.get("name")
        try:
            return take(task["what"], rows.get(name, base), name, options, machine["threads"])
        except (BadInput, RuntimeError) as error:
            raise Failed(str(error)) from None

    def write_table():
        write(folder, {"table.md": table_of(results_of(conditions, runs))})

    with Runs(folder / RUNS, STEPS, conditions, {"commit": commit()}) as runs:
        plan(runs, mode, rows, row_words, reasons)
        planned += tasks(options, mode, rows)
        n_valid = sum(not isinstance(row, BadInput) for row in rows.values())
        minutes = "" if options.train else f", in about {options.minutes:g} minute{'s' * (options.minutes != 1)}"
        start = f"{machine_in_words(machine)}: {n_valid} rows{minutes}, steps of "
        start += f"{base.batch_size} × {base.context_length} tokens; it can be interrupted"
        print(tables.wrapped(start), flush=True)
        for run in runs.take(wanted, measure, unit="process"):
            if run.failed:
                reasons[run.row.get("name")] = run.failed
                tqdm.write(f"{in_words(run.row)}: {run.failed}")
            write_table()
        add_predictions(runs, mode, rows, conditions, options.mode)
        if not options.train:
            seconds = 60 * options.minutes - (time.monotonic() - start_time)
            timed = {name: row for name, row in rows.items() if name not in reasons}
            time_rows(options, runs, mode, timed, machine["threads"], seconds, write_table)
        write_table()
        print(tables.brief(results_of(conditions, runs), mode))
    print(f"\nwritten: {folder}/table.md with all figures, and {RUNS}")
    if options.mode in ("ladder", "scaling"):
        print(f"as a page, beside the programs: python ladder.py html {folder}/{RUNS}")


def time_rows(options, runs, mode, rows, threads, seconds, write_table):
    """Lets the rows take turns (turns.py), in about as many seconds, and adds the figures of their processes.

    threads: of this machine. write_table(): called after each round.
    """
    if not rows:
        return
    there = results_of({}, runs)["modes"][mode]["rows"]
    measured = {name: there[name].get("time", []) for name in rows}

    def start(name):
        if options.mode == "peers":
            peer, best = task.PEERS.get(name, ("ours", True))
            given = {"peer": peer, "best": best, "checkout": getattr(options, peer, None)}
            return Processes(task.measure, rows[name], live=True, **given)
        if options.mode == "scaling":
            each = max(1, threads // options.processes)
            return Processes(measurements.time_steps, rows[name], n=int(name), live=True, threads=each)
        return Processes(measurements.time_steps, rows[name], live=True)

    def add(round_figures):
        for name, figures in round_figures.items():
            measured[name].append(figures)
            runs.add({"mode": mode, "name": name, "what": "time", "round": figures["round"]}, figures)
        write_table()

    def fail(name, reason):
        tqdm.write(f"{name}: {reason}")
        row = {"mode": mode, "name": name, "what": "row"}
        runs.put(row, runs.figures(row) | {"note": reason})

    needs = {name: bytes_of(there[name], options.mode, rows[name], name) for name in rows}
    free = FREE * run_alone(measurements.free_memory, next(iter(rows.values())))
    with tqdm(bar_format="{elapsed} {postfix}") as bar:
        pairs, tells = summary.pairs(rows, options.mode), (bar.set_postfix_str, tqdm.write)
        Schedule(rows, pairs, start, measured, add, fail, seconds, needs, free, *tells).measure()


def bytes_of(row, mode, config, name):
    """Bytes of memory that a row's processes are expected to take, from its peak of tensors: of a GPU, or of a CPU."""
    if row.get("profile"):
        memory = row["profile"][0]["memory"]
        if "reserved" in memory:
            return memory["reserved"] + memory["context"]
        return BESIDE + PER_BYTE * memory["peak"]
    if row.get("exchange"):
        return int(name) * (BESIDE + PER_BYTE * row["exchange"][0]["peak"])
    naive = dataclasses.replace(config, **apply([files()["naive"]], {}, vars(config)))  # at most, for a peer
    device_type = choose_device(config.device).type
    return BESIDE + PER_BYTE * predict.predict_memory(naive, device_type, 1).peak


def words_of(rows, base):
    """{row: the words of its command line after those of the config}; none if it is invalid."""
    valid = {name: row for name, row in rows.items() if not isinstance(row, BadInput)}
    return {name: cli.command_line(changes_from(valid[name], base)) if name in valid else [] for name in rows}


def words_there(runs, mode):
    """The words of the rows of a mode in runs, as words_of; None if there are none."""
    there = results_of({}, runs)["modes"].get(mode, {"rows": {}})["rows"]
    return {name: row["words"] for name, row in there.items()} or None


def plan(runs, mode, rows, words, reasons):
    """Adds the rows of a mode to the runs: their words and, from reasons, why they are not measured.

    Raises BadInput if the mode has other rows there.
    """
    valid = {name: row for name, row in rows.items() if not isinstance(row, BadInput)}
    if words_there(runs, mode) not in (None, words):
        raise BadInput(f"{runs.path.parent} holds other rows of {mode}; choose another --out_dir, or remove it")
    for name, row in rows.items():
        update = name in valid and trains_otherwise(row, next(iter(valid.values())))
        update = update or name in task.OTHER_MODELS
        figures = {"words": words[name], "another_update": update, "note": reasons.get(name)}
        runs.put({"mode": mode, "name": name, "what": "row"}, figures)


def take(measurement, config, name, options, threads):
    """Takes one of measurements.MEASUREMENTS of a row. threads: of this machine."""
    function = measurements.MEASUREMENTS[measurement]
    if options.mode == "scaling" and name:  # a single process gets as many threads as one of several
        return run_together(function, config, n=int(name), threads=max(1, threads // options.processes))[0]
    return run_alone(function, config)


def add_predictions(runs, mode, rows, conditions, kind):
    """Adds to each profiled row its predicted memory and, for one process, the least time of its step on this machine.

    The least time follows from the limits that were measured with the rows. Several processes on a CPU have no
    prediction: their peaks differ from run to run, probably because gloo's threads keep messages for a while.
    """
    part, machine, scaling = results_of({}, runs)["modes"][mode], conditions["machine"], kind == "scaling"
    device_type = "cuda" if machine["gpu"] else "cpu"
    limits = None if scaling else part["limits"]
    device = devices.measured(machine_in_words(machine), limits) if limits else None
    for name, row in tqdm(part["rows"].items(), unit="prediction", leave=False, disable=None):
        if scaling and device_type == "cpu" and int(name) > 1:
            continue
        predicted = {}
        with contextlib.suppress(BadInput):  # no torchao, no prediction
            if row.get("profile") or row.get("exchange"):
                peak = predict.predict_memory(rows[name], device_type, int(name) if scaling else 1).peak
                predicted["memory"] = peak
            if device and row.get("profile"):
                predicted["bounds"] = predict.predict_time(rows[name], device, device_type).bounds
        if predicted:
            runs.put({"mode": mode, "name": name, "what": "predicted"}, predicted)


def conditions_of(options, config_words):
    """The conditions that all measurements in a file share."""
    config = load_config(config_words)
    return {
        "machine": run_alone(measurements.machine_facts, config),
        "config": config_words,
        "keys": dataclasses.asdict(config),
        "data": open_dataset(config).fingerprint(),
        "code": code_hash(),
    }


def tasks(options, mode, rows):
    """The rows to be measured before any is timed, in order; those of the machine's limits have no name."""
    if options.train:
        return [{"mode": mode, "name": name, "what": "curve"} for name in rows]
    if options.mode == "peers":
        return []
    once, planned = "exchange" if options.mode == "scaling" else "profile", []
    for number, name in enumerate(rows):
        if number % 5 == 0:  # several times, as the machine's speed may change
            planned.append({"mode": mode, "what": "limits", "round": number // 5 + 1})
        planned.append({"mode": mode, "name": name, "what": once})
    return planned
