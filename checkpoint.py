"""Checkpoints: saved atomically, loaded exactly.

A checkpoint is one file, written by torch.save and read with weights_only=True (tensors and plain values, no code):

    format_version, config (every key), model (state dict, plain names), optimizer (its state by parameter),
    scaler (of float16 gradients), generators (random states by device, a row a process),
    progress (step, best_val_loss, interval_loss, interval_steps)

The tensors are whole, however many processes trained: any number of them, sharded or not, continues from one.
"""

import dataclasses
import os
import zipfile
from pathlib import Path

import torch

import parallel
from config import BadInput

FORMAT_VERSION = 1
PARTS = ("config", "model", "optimizer", "scaler", "generators", "progress")
SHAPE = "n_layer n_head n_embd vocab_size bias"  # keys of the config that fix the shapes of the tensors


def save(path, config, model, optimizer, progress):
    """Writes a checkpoint. The file at path is at every instant the old one or the new one, whole.

    Every process has to call it; the first one writes.
    """
    state = {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "model": parallel.whole(model.state_dict()),
        "optimizer": parallel.whole(optimizer.state_dict()["state"]),
        "scaler": optimizer.scaler.state_dict() if scales(optimizer) else {},
        "generators": generator_states(),
        "progress": {**progress, "interval_loss": float(progress["interval_loss"])},  # it may be on the device
    }
    if parallel.rank() > 0:
        return
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder):
    """Makes a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(path):
    """The checkpoint's dict, tensors on the CPU. Raises BadInput if the file is not a checkpoint of ours."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"no checkpoint at {path}; expected a file such as out/x/last.pt")
    try:
        if damaged := zipfile.ZipFile(path).testzip():  # torch.save writes checksums, torch.load reads none
            raise ValueError(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["format_version"] if isinstance(state, dict) else None
        if version == FORMAT_VERSION and (wrong := [part for part in PARTS if not isinstance(state.get(part), dict)]):
            raise ValueError(f"it has no {' and no '.join(wrong)}")
    except Exception as error:  # a damaged file fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{path} is damaged or not a checkpoint of nanoladder ({reason})") from None
    if version != FORMAT_VERSION:
        raise BadInput(f"{path} has format {version}; this version reads format {FORMAT_VERSION}")
    return state


def load_weights(model, state, path):
    """Puts a checkpoint's weights into the model; a model with a shorter context takes the first positions."""
    ours, theirs = model.config, state["config"]
    for key in SHAPE.split():
        if getattr(ours, key) != theirs.get(key):
            raise BadInput(
                f"{path} has {key}={theirs.get(key)}, the config {key}={getattr(ours, key)}; expected the same"
            )
    if ours.context_length > theirs["context_length"]:
        raise BadInput(
            f"context_length={ours.context_length} is longer than the checkpoint's ({path}); "
            f"expected at most {theirs['context_length']}"
        )
    try:
        weights = dict(state["model"])
        weights["position_embedding.weight"] = weights["position_embedding.weight"][: ours.context_length]
        padding = len(model.token_embedding.weight) - ours.vocab_size  # may be another than the checkpoint's
        tokens = torch.nn.functional.pad(weights["token_embedding.weight"][: ours.vocab_size], (0, 0, 0, padding))
        weights["token_embedding.weight"] = weights["head.weight"] = tokens
        own = model.state_dict()
        model.load_state_dict({name: parallel.part(weight, own.get(name)) for name, weight in weights.items()})
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"{path} is damaged: its weights do not fit its config ({reason})") from None


def resume(path, model, optimizer):
    """Continues from a checkpoint: model, optimizer and generators as they were. Returns the progress."""
    state = load(path)
    for key in ("context_length", "pad_vocab_to"):
        if getattr(model.config, key) != state["config"][key]:
            raise BadInput(
                f"{path} was trained with {key}={state['config'][key]}; expected the same to resume; "
                f"to start anew from its weights: --init_from={path}"
            )
    load_weights(model, state, path)
    # Hyperparameters come from the config; only what was learned comes from the file.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    learned = {
        index: {name: parallel.part(value, parameters[index]) for name, value in values.items()}
        for index, values in state["optimizer"].items()
    }
    optimizer.load_state_dict({"state": learned, "param_groups": optimizer.state_dict()["param_groups"]})
    if scales(optimizer) and state["scaler"]:
        optimizer.scaler.load_state_dict(state["scaler"])
    set_generator_states(state["generators"])
    return state["progress"]


def scales(optimizer):
    """Whether the gradients come with a loss scale, as those of float16 do."""
    return hasattr(optimizer, "scaler") and optimizer.scaler.is_enabled()


def generator_states():
    """The random states by device, a row a process."""
    states = {"cpu": parallel.rows(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        states["cuda"] = parallel.rows(torch.cuda.get_rng_state())
    return states


def set_generator_states(states):
    """Sets this process's; where there were fewer processes, it stays as it was seeded."""
    for kind, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if kind in states and (kind == "cpu" or torch.cuda.is_available()):
            rows = torch.atleast_2d(states[kind])  # a state without rows was written before there were processes
            if parallel.rank() < len(rows):
                set_state(rows[parallel.rank()].clone())  # of a part of a tensor it reads what is before
