"""Trains a layout in each of the processes that lab.equal starts.

Every step is train.py's own. The first run of all is the reference: its weights stay in the folder, and every other run
reports how far it is from them.
"""

import contextlib
import dataclasses
import json
import math
import os

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

import train
from lab import traffic
from nanoladder import checkpoint, data, machine, parallel
from nanoladder.errors import BadInput
from nanoladder.run import load_config

REFERENCE, HALF, NEW_HALF = "reference.safetensors", "half.safetensors", "new_half.safetensors"


def train_layout(layout, sources, words, folder, explain):
    """Trains a layout for each source, as equal.train_layout says. Rank 0 writes a list of rows to rows.json."""
    rows = []
    for source in sources:
        row = {"name": layout.name, "resumed_from": source}
        try:
            row |= follow([*words, *layout.words], folder, source is not None, explain)
        except BadInput as error:
            row["refused"] = str(error)
        rows.append(row)
        if os.environ["RANK"] == "0":  # a refused config has no group
            (folder / "rows.json").write_text(json.dumps(rows))
    parallel.stop()


def pass_on(folder, name):
    """Makes this layout's checkpoint, if it has written one, that which the next resumes. Returns its name, or None."""
    if not (folder / NEW_HALF).exists():
        return None
    os.replace(folder / NEW_HALF, folder / HALF)
    return name


def follow(words, folder, resumed=False, explain=False):
    """Trains a layout, from another one's checkpoint if resumed. Returns what it saw; explain: also what was sent."""
    config = load_config(words)
    device = train.set_up(config)
    dataset = data.open_dataset(config)
    config = dataclasses.replace(config, vocab_size=dataset.vocab_size)
    machine.check(config, device)
    model = train.build_model(config, device)
    parts = model, train.build_optimizer(model, config)
    found = {"first_step": 1, "losses": [], "norms": []}
    if resumed:
        found |= resume(config, *parts, folder)
    batches = train.training_batches(dataset.train, config, found["first_step"], device)
    for step, batch in enumerate(batches, found["first_step"]):
        count = explain and not resumed and step == config.max_steps
        with counted(config, model, found) if count else contextlib.nullcontext():
            loss, norm = train.train_step(*parts, batch, train.learning_rate(step, config), config)
        found["losses"].append(float(loss))
        found["norms"].append(float(norm))
        if step == config.max_steps // 2 and not resumed:
            keep(folder / NEW_HALF, snapshot(config, *parts, step))
    state = snapshot(config, *parts, config.max_steps)
    if parallel.rank() == 0 and (folder / REFERENCE).exists():
        found["weights"] = distances(state["model"], checkpoint.load(folder / REFERENCE)["model"])
    elif parallel.rank() == 0:
        keep(folder / REFERENCE, state)
    return found


def resume(config, model, optimizer, folder):
    """Continues the run that the folder has half of. Returns the next step and the names of wrong tensors."""
    state = checkpoint.load(folder / HALF)
    last = checkpoint.resume(model, optimizer, state, folder / HALF)["step"]
    again = snapshot(config, model, optimizer, last)
    changed = unequal(again["model"], state["model"]) if parallel.rank() == 0 else []
    if parallel.rank() == 0 and config.optimizer != "adamw8bit":  # codes of 8 bits depend on how they are cut
        changed += unequal(again["optimizer"], state["optimizer"])
    return {"first_step": last + 1, "changed": changed}


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


@contextlib.contextmanager
def counted(config, model, found):
    """Counts what each process sends in the step inside, which runs eagerly, as found["sent"]."""
    with torch.compiler.set_stance("force_eager"), traffic.Counter() as counter:
        yield
    found["sent"] = parallel.gather_objects(dict(counter.sent))
    found["expected"] = traffic.expected(config, model.n_params)
