"""Trains a config under every layout and holds each against one process: losses, gradient norms, gathered weights.

    python -m lab.equal config/x.py [more.py ...] [--processes=4] [--steps=12] [--key=value ...]

Layouts are all grids of 2, 4, ... processes along data, tensor, context and pipeline; sharded and not; with every
schedule; in micro-batches. Each trains half of the steps from the beginning, and the others from the checkpoint that
the layout before it saved there. Every step is train.py's own. Ends with code 1 if a layout trains another model. Sizes
are the config's: small ones, and --compile=False, are quick.
"""

import dataclasses
import itertools
import math
import os
import sys
import tempfile
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path
from tqdm import tqdm

import train
from lab.launch import run_together
from lab.layouts import describe, layouts
from lab.plan import at_least
from lab.tables import markdown
from nanoladder import checkpoint, data, machine, parallel
from nanoladder.config import check
from nanoladder.errors import BadInput
from nanoladder.run import load_config

FLOAT32, HALF = 1e-4, 5e-3  # relative tolerances of losses, by the precision of matrix products
NORMS = {FLOAT32: 20, HALF: 40}  # times that: a norm sums up what rounding does to every gradient
KEYS = ("--ddp=True", "--num_workers=0", "--lr_decay_steps=0")
REFERENCE, SAVED, NEW = "reference.safetensors", "saved.safetensors", "new.safetensors"
COLUMNS = {  # the largest differences, and the verdict
    "loss": lambda row: f"{row['largest']['losses']:.1e}",
    "norm": lambda row: f"{row['largest']['norms']:.1e}",
    "weights": lambda row: f"{row['largest']['weights']:.1e}",
    "verdict": lambda row: "" if row["note"] else row["wrong"] or "equal",
}


def main(argv):
    config, processes = parse(argv)
    limits = tolerances(config)
    print(
        f"{config.max_steps} updates of {config.n_layer} layers × {config.n_embd}, {config.batch_size} × "
        f"{config.context_length} tokens, dtype {config.dtype}; torch {torch.__version__} on "
        f"{machine.choose_device(config.device)}; largest differences from one process; tolerances: "
        + ", ".join(f"{kind} {limit:.2g}" for kind, limit in limits.items())
    )
    rows = compare(config, processes, limits)
    print(markdown(COLUMNS, rows))
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
        if reference["note"]:
            raise BadInput(f"one process cannot train this config: {reference['note']}")
        rows = [train_layout(n, layout, Path(folder)) for n, layout in tqdm([*planned, whole], unit="layout")]
    return [judge(row, reference, limits) for row in rows]


def train_layout(n, config, folder):
    """The row of a layout, trained by n processes; note: why it could not be. What it saves is for the next."""
    row = {"name": describe(config, n), "note": None}
    try:
        row |= run_together(train_in_halves, config, folder, n=n, folder=folder)[0]
    except BadInput as error:
        return row | {"note": f"refused: {error}"}
    except RuntimeError as error:
        return row | {"note": f"FAILED: {error}"}
    os.replace(folder / NEW, folder / SAVED)
    return row


def train_in_halves(config, folder):
    """The row of a layout, trained in this process and its peers; from half of its steps on, as another one saved it.

    The first run of all is the reference, whose weights stay in the folder. The row: losses and norms of each step,
    weights {name: distance from the reference's}, and changed, the names of tensors that were not what the checkpoint
    holds after it was resumed.
    """
    check(config)
    device = train.set_up(config)
    split, half = data.open_dataset(config).train, config.max_steps // 2
    machine.check(config, device)
    row = {"losses": [], "norms": []}
    parts = build(config, device)
    advance(config, parts, split, range(1, half + 1), device, row)
    keep(folder / NEW, snapshot(config, *parts, half))
    parts = build(config, device)
    source = folder / (SAVED if (folder / SAVED).exists() else NEW)
    row["changed"] = resume(config, *parts, source)
    advance(config, parts, split, range(half + 1, config.max_steps + 1), device, row)
    state = snapshot(config, *parts, config.max_steps)
    if parallel.rank() == 0:
        if not (folder / REFERENCE).exists():
            keep(folder / REFERENCE, state)
        row["weights"] = distances(state["model"], checkpoint.load(folder / REFERENCE)["model"])
    return row


def build(config, device):
    model = train.build_model(config, device)
    return model, train.build_optimizer(model, config)


def advance(config, parts, split, steps, device, row):
    """Takes these steps, and adds the loss and the gradient norm of each to the row."""
    batches = train.training_batches(split, dataclasses.replace(config, max_steps=steps[-1]), steps[0], device)
    for step, batch in zip(steps, batches, strict=True):
        loss, norm = train.train_step(*parts, batch, train.learning_rate(step, config), config)
        row["losses"].append(float(loss))
        row["norms"].append(float(norm))


def resume(config, model, optimizer, path):
    """Loads a checkpoint. Returns the names of tensors that a new one has otherwise."""
    state = checkpoint.load(path)
    step = checkpoint.resume(model, optimizer, state, path)["step"]
    again = snapshot(config, model, optimizer, step)
    # codes of 8 bits depend on how they are cut
    compared = ["model"] if config.optimizer == "adamw8bit" else ["model", "optimizer"]
    return list(itertools.chain(*(unequal(again[part], state[part]) for part in compared if parallel.rank() == 0)))


def snapshot(config, model, optimizer, step):
    """A checkpoint's dict after a step; in processes other than rank 0 without tensors. Collective."""
    progress = {"step": step, "best_val_loss": math.inf, "interval_loss": 0.0, "interval_steps": 0}
    return checkpoint.snapshot(config, {}, model, optimizer, progress)


def keep(path, state):
    if parallel.rank() == 0:
        checkpoint.write_file(path, state)


# -- judging


def judge(row, reference, limits):
    """The row with what is wrong, if anything, as text, and its largest differences, relative for losses and norms.

    A refused layout is no fault; one that failed is.
    """
    if row["note"]:
        return row | {"wrong": "" if row["note"].startswith("refused") else row["note"]}
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


def unequal(ours, theirs):
    """Lists the names under which two nested dicts of tensors differ, as in ['a']['b']."""
    one, other = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]} for state in (ours, theirs))
    same = {name for name in one.keys() & other.keys() if torch.equal(*map(torch.as_tensor, (one[name], other[name])))}
    return sorted((one.keys() | other.keys()) - same)


def distances(weights, reference):
    """{name: difference} of whole weights from the reference's, in its order; infinite if missing.

    A difference is the largest root mean square over a row: a fault can be in a single row, whereas a single weight
    with a gradient near 0 may differ because rounding decides which way AdamW moves it. Biases of the keys are left
    out: softmax does not depend on them, and their gradients are nothing but rounding errors.
    """
    found = {}
    for name, tensor in reference.items():
        ours = weights.get(name)
        if ours is None or ours.shape != tensor.shape:
            found[name] = math.inf
            continue
        difference = ours - tensor
        if name.endswith("attention.qkv.bias"):
            difference = difference.unflatten(0, (3, -1))[::2]  # of queries and values
        found[name] = difference.square().mean(-1).sqrt().max().nan_to_num(math.inf).item()
    return found | dict.fromkeys(weights.keys() - reference.keys(), math.inf)


if __name__ == "__main__":
    run_script(main)
