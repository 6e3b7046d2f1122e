"""Trains a config under every layout and holds each against one process: losses, gradient norms, gathered weights.

    python -m lab.equal config/x.py [more.py ...] [--processes=4] [--steps=12] [--key=value ...]

Layouts are all grids of 2, 4, ... processes along data, tensor, context and pipeline; sharded and not; with every
schedule; in micro-batches. Each trains half of the steps from the beginning, and the others from the checkpoint that
the layout before it saved there. Every step is train.py's own. Ends with code 1 if a layout trains another model. Sizes
are the config's: small ones, and --compile=False, are quick.
"""

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from tqdm import tqdm

import train
from lab import equal_worker, workers
from lab.layouts import describe, layouts
from lab.plan import at_least
from nanoladder import data, machine
from nanoladder.errors import BadInput
from nanoladder.run import load_config

FLOAT32, HALF = 1e-4, 5e-3  # relative tolerances of losses, by the precision of matrix products
NORMS = {FLOAT32: 20, HALF: 40}  # times that: a norm sums up what rounding does to every gradient
KEYS = ("--ddp=True", "--num_workers=0", "--lr_decay_steps=0")
REFUSED = "nanoladder.errors.BadInput: "


def main(argv):
    config, processes = parse(argv)
    limits = tolerances(config)
    print(
        f"{config.max_steps} updates of {config.n_layer} layers × {config.n_embd}, {config.batch_size} × "
        f"{config.context_length} tokens, dtype {config.dtype}; torch {torch.__version__} on "
        f"{machine.choose_device(config.device)}; tolerances: "
        + ", ".join(f"{kind} {limit:.2g}" for kind, limit in limits.items())
    )
    rows = compare(config, processes, limits)
    print(table(rows))
    if wrong := [row["name"] for row in rows if row["wrong"]]:
        sys.exit(f"error: {len(wrong)} of {len(rows)} layouts differ from one process: {'; '.join(wrong)}")


def parse(argv):
    """The config with which every layout trains, and --processes. Raises BadInput if layouts could not be equal."""
    usage = "python -m lab.equal config/x.py [more.py ...] [--processes=4] [--steps=12] [--key=value ...]"
    parser = Parser(prog="python -m lab.equal", usage=usage, description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=at_least(2), default=2, help="most processes of a layout (default: 2)")
    parser.add_argument("--steps", type=at_least(2), default=12, help="updates of each run, at least 2 (default: 12)")
    options, words = parser.parse_known_args(argv)
    if "WORLD_SIZE" in os.environ:
        raise BadInput("lab.equal starts its processes itself; expected `python -m lab.equal`, without torchrun")
    config = load_config(words, vars(options))
    if config.dropout:
        raise BadInput(f"dropout={config.dropout}: each layout drops other activations; expected --dropout=0")
    steps = [f"--max_steps={options.steps}", f"--warmup_steps={options.steps // 4}"]
    # The less rounding, the smaller the faults that show; but a GPU's half-precision messages have to be tried as well
    on_cpu = machine.choose_device(config.device).type == "cpu"
    exact = ["--dtype=float32"] if config.dtype == "auto" and on_cpu else []
    whole = ["--micro_batch_size=0"] if config.micro_batch_size == "auto" else []
    vocabulary = f"--vocab_size={data.open_dataset(config).vocab_size}"
    return load_config([*words, *KEYS, *exact, *whole, *steps, vocabulary]), options.processes


def tolerances(config):
    """{kind: largest difference of an equal run}: relative for losses and norms; for weights as distances() has it.

    In half precision (or TF32), rounding decides which way weights with small gradients go. Two runs may then end up
    twice as far apart as AdamW moves a weight, which is the sum of the learning rates.
    """
    device = machine.choose_device(config.device)
    exact = device.type == "cpu" or config.matmul_precision == "highest"
    exact = exact and machine.choose_dtype(config.dtype, device) == torch.float32
    losses = FLOAT32 if exact else HALF
    moved = sum(train.learning_rate(step, config) for step in range(1, config.max_steps + 1))
    return {"losses": losses, "norms": NORMS[losses] * losses, "weights": losses if exact else 2 * moved}


# -- training


def compare(config, processes, limits):
    """Trains every layout of up to so many processes. Returns a judged row for each but the reference.

    One process is the first layout, the reference, and once more the last one, which continues another's run. Raises
    BadInput if it cannot train the config.
    """
    counts = [2**k for k in range(processes.bit_length())]
    whole, *planned = [(n, layout) for n in counts for layout in layouts(config, n)]
    with tempfile.TemporaryDirectory() as folder:
        reference = train_layout(*whole, Path(folder))
        if "failed" in reference:
            raise BadInput(f"one process cannot train this config: {reference['failed']}")
        rows = [train_layout(n, layout, Path(folder)) for n, layout in tqdm([*planned, whole], unit="layout")]
    return [judge(row, reference, limits) for row in rows]


def train_layout(n, config, folder):
    """The row of a layout, trained by n processes, as equal_worker has it; what it has saved is for the next."""
    name = describe(config, n)
    try:
        workers.run(equal_worker.train_layout, config, folder, n=n, folder=folder)
    except (ProcessRaisedException, ProcessExitedException) as error:
        lines = str(error).strip().splitlines()
        reasons = [line for line in lines if re.match(rf"{REFUSED}|[\w.]*(Error|Exception)\b", line)] or lines[-1:]
        return {"name": name, "failed": reasons[0]}
    os.replace(folder / equal_worker.NEW_HALF, folder / equal_worker.HALF)
    return {"name": name} | json.loads((folder / "row.json").read_text())


# -- judging


def judge(row, reference, limits):
    """The row with what is wrong, if anything, as text, and its largest differences, relative for losses and norms.

    A refused layout is no fault; one that failed is.
    """
    if "failed" in row:
        return row | {"wrong": "" if row["failed"].startswith(REFUSED) else f"FAILED: {row['failed']}", "largest": {}}
    faults, largest = [], {}
    for kind in ("losses", "norms"):
        relative = [distance(one, other) for one, other in zip(row[kind], reference[kind], strict=True)]
        largest[kind] = max(relative)
        if beyond := [step for step, value in enumerate(relative, 1) if value > limits[kind]]:
            faults.append(f"{kind} from step {beyond[0]}")
    if differing := [tensor for tensor, value in row["weights"].items() if value > limits["weights"]]:
        faults.append(f"weights of {differing[0]}, of {len(differing)} tensors")
    if row["changed"]:
        faults.append(f"the checkpoint's {row['changed'][0]} came back changed")
    largest["weights"] = max(row["weights"].values())
    return row | {"wrong": f"WRONG: {'; '.join(faults)}" if faults else "", "largest": largest}


def distance(one, other):
    """Relative difference; infinite if a number is not finite."""
    return abs(one - other) / abs(other) if math.isfinite(one) and math.isfinite(other) and other else math.inf


def table(rows):
    """The matrix as text: a line for each run."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'largest difference of':<{width}}  {'loss':>8}  {'norm':>8}  {'weights':>8}"]
    for row in rows:
        numbers = [row["largest"].get(kind) for kind in ("losses", "norms", "weights")]
        cells = "  ".join(f"{'' if number is None else f'{number:.1e}':>8}" for number in numbers)
        verdict = row["wrong"] or (f"refused: {row['failed'].removeprefix(REFUSED)}" if "failed" in row else "equal")
        lines.append(f"{row['name']:<{width}}  {cells}  {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
