"""Trains a layout in each of the processes that lab.equal starts.

Every step is train.py's own. The first run of all is the reference: its weights stay in the folder, and every other run
reports how far it is from them.
"""

import dataclasses
import itertools
import json
import math

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

import train
from nanoladder import checkpoint, data, machine, parallel
from nanoladder.config import check

REFERENCE, HALF, NEW_HALF = "reference.safetensors", "half.safetensors", "new_half.safetensors"


def train_layout(config, folder):
    """Trains a layout, from half of its steps on as what another one has saved. Rank 0 writes row.json.

    The row: losses and norms of each step, weights {name: distance from the reference's}, and changed, the names of
    tensors that were not what the checkpoint holds after it was resumed.
    """
    check(config)
    device = train.set_up(config)
    split, half = data.open_dataset(config).train, config.max_steps // 2
    machine.check(config, device)
    row = {"losses": [], "norms": []}
    parts = build(config, device)
    advance(config, parts, split, range(1, half + 1), device, row)
    keep(folder / NEW_HALF, snapshot(config, *parts, half))
    parts = build(config, device)
    source = folder / (HALF if (folder / HALF).exists() else NEW_HALF)
    row["changed"] = resume(config, *parts, source)
    advance(config, parts, split, range(half + 1, config.max_steps + 1), device, row)
    state = snapshot(config, *parts, config.max_steps)
    if parallel.rank() == 0:
        if not (folder / REFERENCE).exists():
            keep(folder / REFERENCE, state)
        row["weights"] = distances(state["model"], checkpoint.load(folder / REFERENCE)["model"])
        (folder / "row.json").write_text(json.dumps(row))
    parallel.stop()


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
