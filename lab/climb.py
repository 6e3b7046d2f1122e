"""Runs the modes of profile.py. Its own are those that measure the ladder on this machine, round by round.

Every figure comes from train.py's own train_step on real batches, in processes of their own (measure.py) that run one
after the other, forked from one that has imported all they need (forkserver.py). The first process of a row trains on
the same batches as naive's: it records the losses and counts where memory and time go. The others time the row. Rows
take turns, round after round, so that a drift of the machine hits all of them alike. --mode=scaling measures 1 to
--processes processes at once. Optimizers differ in whole runs only: --mode=optimizers trains with each of them before
the rounds.
"""

import contextlib
import dataclasses
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from lab import devices, judge, losses, measure, pictures, plan, predict, tables, tune
from lab.compare import compare
from lab.launch import run_alone
from lab.peers import mode as peers
from lab.results import (
    ROOT,
    code_hash,
    default_folder,
    machine_name,
    open_mode,
    open_results,
    read_results,
    write,
    write_results,
)
from lab.summary import BEYOND, factors
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.machine import choose_device
from nanoladder.run import load_config

CPU_FLOPS, GPU_FLOPS = 5e10, 5e13  # FLOP/s of a training step, of a thread and of a GPU: enough to say how long
STARTING, COMPILING = 2.0, 30.0  # seconds of a process, and of the compiler, which later takes code from its cache


def main(argv):
    options, words = plan.parse(argv)
    if options.mode not in ("compare", "predict"):
        check_device(load_config(words))
    match options.mode:
        case "compare":
            print(compare(*map(read_results, words)))
        case "predict":
            predict_all(options, words)
        case "losses":
            compare_losses(options, words)
        case "judge":
            sys.exit(judge.judge(options, words))
        case "tune":
            tune.tune(options, sized(words), lambda: conditions_of(options, words, *tune.CODE))
        case "peers":
            peers.compare(options, words, lambda: conditions_of(options, words, *peers.CODE))
        case _:
            climb(options, words)


def check_device(config):
    """Raises BadInput for a device whose memory and time by kind of work PyTorch does not report."""
    if choose_device(config.device).type == "mps":
        raise BadInput("device=mps cannot be measured; expected --device=cpu, or a machine with CUDA")


def sized(config_words):
    """The config's words, with the dataset's vocab_size if they have none."""
    config = load_config(config_words)
    if config.vocab_size:
        return config_words
    return [*config_words, f"--vocab_size={open_dataset(config).vocab_size}"]


def predict_all(options, config_words):
    """Prints the cost of the run, and the memory and least time of each stage; writes them, if there is an out_dir."""
    try:
        words = sized(config_words)
    except BadInput as error:
        raise BadInput(f"{error}; or, to predict without the data, --vocab_size=NUMBER") from None
    config = load_config(words)
    n, price, memory_gb = options.world_size, options.price_per_hour, options.memory_gb
    rows = []
    for stage in [] if config.stage else options.stages or plan.stages_of(n):
        try:
            rows.append((stage, load_config([*words, f"--stage={stage}"])))
        except BadInput as error:
            rows.append((stage, error))
    rows.append((config.stage or "as configured", config))
    kind = config.device.partition(":")[0].replace("auto", "cuda")
    device = device_of(options, kind, words)
    cost = predict.costs(config, options.mfu, max(device.flops.values()), n)
    header = tables.run_in_words(cost, device, config.max_steps, options.mfu, n, price)
    if memory_gb:
        header += (
            f"\nAt the end: the largest micro-batch, and the longest context of one sequence, in {memory_gb:g} GB."
        )
    print(f"{header}\n")
    conditions, found, width = (device, kind, n, memory_gb), [], max(len(name) for name, _ in rows)
    for row in tqdm(predict.predict_rows(rows, *conditions), total=len(rows), unit="stage", leave=False):
        found.append(row)
        columns = tables.predicted_columns(found[0], n, memory_gb, price)
        headings = [tables.line(columns, None, width)] * (len(found) == 1)
        tqdm.write("\n".join([*headings, tables.line(columns, found[-1], width)]))
    if not options.out_dir:
        return print("\n--out_dir=FOLDER writes all figures to predict.md, and predict.png")
    folder, of = Path(options.out_dir), f" of each of {n} processes" * (n > 1)
    text = [
        f"`{' '.join(config_words)}`",
        header,
        f"Predicted memory of a step{of}, GB (and bytes per parameter); the formula is of Korthikanti et al. 2022:",
        tables.markdown(tables.memory_columns(), found),
        tables.least_times(found, device, config, n, price),
    ]
    write(folder, {"predict.md": "\n\n".join(text)})
    on = device.name if n == 1 else f"{n} × {device.name}"
    pictures.draw_least_times(found, pictures.heading("predict", config_words, on), folder / "predict.png")
    print(f"\nwritten: {folder}/predict.md and predict.png")


def device_of(options, kind, config_words):
    """The devices.Device that --mode=predict predicts for; one that is here, and is not named, is measured."""
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"device={kind}: memory and time are predicted for cpu and cuda; expected one of them")
    if options.gpu and options.device_file:
        raise BadInput(f"--gpu={options.gpu} and --device_file={options.device_file}: expected one of them")
    if options.gpu and kind != "cuda":
        raise BadInput(f"--gpu={options.gpu} with --device={kind}: expected --device=cuda, or --device_file=FILE")
    if options.device_file:
        return devices.read_device(options.device_file)
    if options.gpu or (kind == "cuda" and not torch.cuda.is_available()):
        return devices.datasheet(options.gpu or "H100")
    print("measuring this machine …", file=sys.stderr)
    machine, limits = (run_alone(part, config_words) for part in ("machine", "limits"))
    return devices.measured(tables.machine_in_words(machine), [limits])


def compare_losses(options, config_words):
    """Measures each variant of head and loss, round by round, and writes losses.md."""
    words = sized(config_words)
    config, rows = load_config(words), {name: [] for name in losses.VARIANTS}
    device = run_alone("machine", words)
    folder = Path(options.out_dir or default_folder({"machine": device, "config": config_words}))
    n_tokens = (config.micro_batch_size or config.batch_size) * config.context_length
    conditions = (
        f"Head and loss, forward and backward: {n_tokens} tokens, vocabulary {config.vocab_size}, width "
        f"{config.n_embd}, dtype {config.dtype}, torch {device['torch']}, {machine_name(device)}"
    )
    for count, name in tqdm([(n, name) for n in range(options.repeats) for name in rows], unit="process"):
        if count == len(rows[name]):  # no reason why it cannot run
            try:
                rows[name].append(run_alone("loss", [*words, f"--variant={name}"]))
            except RuntimeError as error:
                rows[name] = str(error).removeprefix("error: ")
        text = losses.table(rows, conditions)
        write(folder, {"losses.md": text})
    print(f"{text}\n\nwritten: {folder}/losses.md")


def climb(options, config_words):
    """Measures what results.json does not hold yet, and writes it after each process."""
    config, scaling = load_config(config_words), options.mode == "scaling"
    rows = plan.rows(options, config_words)
    conditions = conditions_of(options, config_words)
    folder = Path(options.out_dir or default_folder(conditions))
    results = open_results(folder, conditions)
    training = {"train_steps": options.train_steps, "grid": options.grid} if options.mode == "optimizers" else {}
    reasons = plan.not_applicable(rows, options.mode, sized(config_words))
    kind = plan.part_of_results(options)
    part = open_mode(folder, results, kind, rows, reasons, training)
    replicated = options.dimension == "data" and config.shard == "none"
    todo = tasks(options, rows, replicated)
    print(tables.wrapped(forecast(todo, rows, part, options, config_words, results["machine"])), flush=True)
    with tqdm(todo, unit="process") as bar:
        for name, measurement, count in bar:
            bar.set_postfix_str(f"{name or 'the machine'}, {measurement}")
            row = part["rows"][name] if name else part
            done = row.setdefault(measurement, [])
            if len(done) >= count or row.get("note"):
                continue
            words = [*config_words, *row.get("words", []), *words_for(measurement, name, options, folder, results)]
            if measurement == "curve":
                tried = factors(options.grid, [curve["val_loss"] for curve in done])
                if len(done) == len(tried):  # the best learning rate is between two others
                    continue
                words += plan.training_run(options, config_words, tried[len(done)])
            try:
                n = int(name) if scaling and name else 1
                done.append(run_alone(measurement, words, n))
                if measurement == "exchange":
                    done[-1]["predicted"] = predicted_peak(words, n, results["machine"]["gpu"])
            except RuntimeError as error:
                row["note"] = str(error)
                bar.write(f"{name or 'the machine'}, {measurement}: {error}")
            write_results(folder, results)
    if not scaling:
        add_limits(part, results["machine"], config_words)
        write_results(folder, results)
    pictures.draw(results, kind, folder / f"{kind}.png")
    print(tables.brief(results, kind))
    print(f"\nwritten: {folder}/table.md with all figures, results.json and {kind}.png")


def forecast(todo, rows, part, options, config_words, machine):
    """The line above a measurement: the rows, the step, and about how long all takes."""
    config, seconds = load_config(sized(config_words)), 0.0
    flops = predict.costs(config)["flops_per_token"] * config.batch_size * config.context_length
    step = flops / (GPU_FLOPS if machine["gpu"] else CPU_FLOPS * machine["threads"])
    for name, measurement, count in todo:
        row = part["rows"][name] if name else {}
        if row.get("note") or len(row.get(measurement, ())) >= count:
            continue
        steps = {"time": max(options.steps, measure.WINDOW / step), "curve": options.train_steps}.get(measurement, 8)
        compiles = name and load_config([*config_words, *rows[name]]).compile
        compiling = COMPILING * (1 if measurement == "examine" else 0.2) if compiles else 0.0
        seconds += STARTING + compiling + (steps * step if name else 2 * STARTING)
    measured, minutes = [row for row in part["rows"].values() if not row.get("note")], math.ceil(seconds / 60)
    return (
        f"{tables.machine_in_words(machine)}: {len(measured)} rows, steps of {config.batch_size} × "
        f"{config.context_length} tokens; about {minutes} minute{'s' * (minutes > 1)} (it can be interrupted)"
    )


def add_limits(part, machine, config_words):
    """Adds to each timed row the least time of its step on this machine, by the limits that were measured with it."""
    device = devices.measured(tables.machine_in_words(machine), part["limits"])
    for row in tqdm(part["rows"].values() if device else [], unit="limit", leave=False, disable=None):
        if row.get("time"):
            with contextlib.suppress(BadInput):  # the 8-bit states of bitsandbytes cannot be predicted
                config = load_config(sized([*config_words, *row["words"]]))
                time = predict.predict_time(config, device, "cuda" if machine["gpu"] else "cpu")
                row["limit"] = {"fused": time.fused, "kinds": time.by(0), "bounds": time.by(1)}


def predicted_peak(words, n, gpu):
    """Predicted peak bytes of one of n processes; None if they cannot be predicted."""
    config = load_config(sized([word for word in words if not word.startswith("--threads")]))
    with contextlib.suppress(BadInput):
        return predict.predict_memory(config, "cuda" if gpu else "cpu", n).peak


def conditions_of(options, config_words, *more):
    """The conditions that all measurements in a file share. more: patterns of files that they also depend on."""
    config = load_config(config_words)
    return {
        "machine": run_alone("machine", config_words),
        "config": config_words,
        "keys": dataclasses.asdict(config),
        "data": open_dataset(config).fingerprint(),
        "steps": options.steps,
        "code": code_hash(ROOT, *more),
    }


def tasks(options, rows, replicated):
    """[(row, measurement, their number in the row afterwards)] in order; the row of the machine's limits is None.

    Losses and memory come first, then the rounds. Every second round goes backwards, so that no row is always the
    first or always follows the same one. A step without communication is timed only if each process has whole
    gradients (replicated).
    """
    scaling = options.mode == "scaling"
    found = [(name, "exchange" if scaling else "examine", 1) for name in rows]
    if options.mode == "optimizers":
        most = len(options.grid) + BEYOND
        found += [(name, "curve", count) for name in rows for count in range(1, 1 + most)]
    for count in range(1, options.repeats + 1):
        found.append((None, "limits", count))
        for name in list(rows) if count % 2 else reversed(rows):
            found.append((name, "time", count))
            if scaling and replicated and name != "1":
                found.append((name, "silent", count))
    return found


def words_for(measurement, name, options, folder, results):
    """The options of measure.py for a measurement of a row."""
    words = []
    if measurement in ("time", "silent"):
        words.append(f"--steps={options.steps}")
    if options.mode == "scaling" and name:  # as many threads in one process alone as in one of all
        words.append(f"--threads={max(1, results['machine']['threads'] // options.processes)}")
    if options.trace and measurement == "examine":
        words.append(f"--trace={Path(folder, 'traces', name.replace(' ', '_'))}")
    return words
