"""Checkpoints: saved whole or not at all, while training goes on; loaded exactly, or refused in a line.

A checkpoint is one file, written by torch.save and read with weights_only=True (tensors and plain values, no code):

    format_version, config (every key), model (state dict, plain names), optimizer (its state by parameter),
    scaler (of float16 gradients), generators (random states by device, a row a process),
    progress (step, best_val_loss, interval_loss, interval_steps)

The tensors are whole, however many processes trained: any number of them, sharded or not, continues from one.
In a run's folder last.pt is the newest, best.pt the best, and step_00000250.pt and so on are the most recent ones: up
to three names of one file.
"""

import dataclasses
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from model import GPT
from nanoladder import files, optim, parallel
from nanoladder.checkpoint import archive
from nanoladder.config import DEFAULTS, Config, check, typed
from nanoladder.errors import BadInput

FORMAT_VERSION = 1
PARTS = ("config", "model", "optimizer", "scaler", "generators", "progress")
PROGRESS = {"step": int, "best_val_loss": float, "interval_loss": float, "interval_steps": int}
SHAPE = "n_layer n_head n_embd vocab_size bias"  # keys of the config that fix the shapes of the tensors
MODEL = {*SHAPE.split(), "context_length", "pad_vocab_to", "compile"}  # keys of the config that the model reads


class Damaged(BadInput):
    """A file is no whole checkpoint of ours."""


# -- saving


class Writer:
    """Saves a run's checkpoints, each while training goes on, for `with`: at its end the last one is written.

    One that cannot be written, to a full disk say, is warned of, and the next save tries again. If at the end the last
    or the best one is still missing, the program exits with 1.
    """

    def __init__(self, config):
        self.config = config
        self.folder = Path(config.out_dir)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pending = None  # what is being written
        self.missing = {}  # {name: the step that should be there}

    def save(self, model, optimizer, progress, best):
        """Copies the state and leaves it to be written, as best.pt too if it is the best. Every process has to call it.

        Waits until the one before is written: there is never more than one copy.
        """
        self.wait()
        state = snapshot(self.config, model, optimizer, progress)
        if parallel.rank() == 0:
            self.pending = self.thread.submit(self.write, state, best)

    def wait(self):
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def write(self, state, best):
        step, last = state["progress"]["step"], self.folder / "last.pt"
        self.missing |= dict.fromkeys(["last.pt", "best.pt"] if best else ["last.pt"], step)
        try:
            save(last, state)
            del self.missing["last.pt"]
            files.link(last, self.folder / f"step_{step:08}.pt")
            if best:
                files.link(last, self.folder / "best.pt")
                del self.missing["best.pt"]
            for path in list(history(self.folder).values())[self.config.keep_checkpoints :]:
                path.unlink()
        except OSError as error:
            tqdm.write(f"warning: the checkpoint of step {step} is not saved: {error}", file=sys.stderr)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        self.thread.shutdown()
        self.wait()
        if self.missing:
            names = " and ".join(f"{name} of step {step}" for name, step in self.missing.items())
            line = f"error: {self.folder} lacks {names}, which could not be written"
            if failure is None:
                sys.exit(line)
            print(line, file=sys.stderr)


def snapshot(config, model, optimizer, progress):
    """All that continuing needs, on the CPU and in memory of its own. Every process has to call it."""
    return {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "model": parallel.whole(model.state_dict(keep_vars=True)),  # so that tied weights are one object
        "optimizer": parallel.whole(optim.to_plain(optimizer.state_dict()["state"])),
        "scaler": optimizer.scaler.state_dict() if scales(optimizer) else {},
        "generators": generator_states(),
        "progress": {**progress, "interval_loss": float(progress["interval_loss"])},  # it may be on the device
    }


def save(path, state):
    """Writes a snapshot. The file at path is at every instant the old one or the new one, whole. Raises OSError."""

    def serialize(file):
        try:
            torch.save(state, file)
        except RuntimeError as error:  # what torch makes of a write that failed
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    files.write(path, serialize)


def found(folder):
    """A run's checkpoints in the order in which resuming tries them."""
    paths = [folder / "last.pt", *history(folder).values(), folder / "best.pt"]
    return [path for path in paths if os.path.lexists(path)]


def history(folder):
    """The most recent checkpoints, {step: path}, the newest first."""
    paths = {path.stem.removeprefix("step_"): path for path in folder.glob("step_*.pt")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int, reverse=True)}


def clear(folder, step):
    """Removes what a run that begins after `step` replaces, at 0 all of it, and what killed processes were writing."""
    files.remove_temporaries(folder)
    for path in [path for later, path in history(folder).items() if later > step] if step else found(folder):
        path.unlink()


# -- loading


def newest(folder):
    """The newest whole checkpoint of a run: its path and load()'s dict. Says which newer ones are damaged.

    Raises BadInput if none is whole.
    """
    folder, damaged = Path(folder), []
    for path in found(folder) or [folder / "last.pt"]:
        try:
            state = load(path)
        except Damaged as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            print(f"warning: {line}: continuing from {path.name}, step {state['progress']['step']}")
        return path, state
    raise BadInput("; ".join([*damaged, "--init_from=scratch --overwrite=True begins anew"]))


def load(path):
    """The checkpoint's dict, its tensors those in the file, which are read when they are used.

    Raises Damaged if the file is not a whole checkpoint of ours, BadInput if its format is another.
    """
    path = Path(path)
    if not path.is_file():
        kind = BadInput if path.is_dir() else Damaged  # which nothing could replace
        raise kind(f"no checkpoint at {path}; expected a file such as out/x/last.pt")
    try:
        archive.check(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        version = state.get("format_version") if isinstance(state, dict) else None
        if type(version) is not int:
            raise ValueError("it has no format_version")
        if version == FORMAT_VERSION:
            check_contents(state, path.stat().st_size)
    except Exception as error:  # a damaged file fails in many ways
        raise damage(path, error) from None
    if version != FORMAT_VERSION:
        raise BadInput(f"{path} has format {version}; this version reads format {FORMAT_VERSION}")
    return state


def damage(path, error):
    """What went wrong with a file, as Damaged: one line, whatever the file holds."""
    reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Damaged(f"{path} is damaged or not a checkpoint of nanoladder ({reason})")


def check_contents(state, size):
    """Raises ValueError or BadInput unless a checkpoint, of size bytes, has every part, and weights as configured."""
    if wrong := [part for part in PARTS if not isinstance(state.get(part), dict)]:
        raise ValueError(f"it has no {' and no '.join(wrong)}")
    for key, kind in PROGRESS.items():
        if type(state["progress"].get(key)) is not kind:
            raise ValueError(f"its progress has no {key}")
    if state["progress"]["step"] < 1 or state["progress"]["interval_steps"] < 0:
        raise ValueError("its progress is before the first step")
    weights, names, bytes_needed = state["model"], set(), 0
    for name, shape in shapes(config_of(state)):
        tensor = weights.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != torch.float32:
            raise ValueError(f"its {name} is not what its config says, float32 {tuple(shape)}")
        names.add(name)
        bytes_needed += tensor.nbytes if name != "head.weight" else 0  # the token embedding's
    if bytes_needed > size:
        raise ValueError(f"its weights are {bytes_needed} bytes, more than the file")
    if weights.keys() - names:
        raise ValueError("it has weights that its config's model has not")


def config_of(state):
    """The config of a checkpoint's model, defaults for the rest. Raises ValueError or BadInput where it is wrong."""
    values = state["config"]
    if values.keys() - DEFAULTS.keys():
        raise ValueError("its config has keys that this version does not know")
    for key, value in values.items():
        if type(value) not in (bool, int, float, str) or len(str(value)) > 4096:
            raise ValueError(f"its config's {key} is no value")
        typed(key, value, "its config")
    if missing := MODEL - values.keys():
        raise ValueError(f"its config has no {' and no '.join(sorted(missing))}")
    config = Config(**{key: values[key] for key in MODEL})
    check(config)
    return config


def shapes(config):
    """Yields the name and the shape of every weight, from a model of one block that takes no memory."""
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, n_layer=1))
    for name, tensor in model.state_dict().items():
        for n in range(config.n_layer) if name.startswith("blocks.0.") else [0]:
            yield name.replace("blocks.0.", f"blocks.{n}."), tensor.shape


def check_shape(ours, theirs, path):
    """Raises BadInput unless a model of our config takes the weights of theirs."""
    for key in SHAPE.split():
        if getattr(ours, key) != theirs[key]:
            raise BadInput(f"{path} has {key}={theirs[key]}, the config {key}={getattr(ours, key)}; expected the same")
    if ours.context_length > theirs["context_length"]:
        raise BadInput(
            f"context_length={ours.context_length} is longer than the checkpoint's ({path}); "
            f"expected at most {theirs['context_length']}"
        )


def load_weights(model, state, path):
    """Puts a checkpoint's weights into the model; a model with a shorter context takes the first positions."""
    ours = model.config
    check_shape(ours, state["config"], path)
    weights = dict(state["model"])
    weights["position_embedding.weight"] = weights["position_embedding.weight"][: ours.context_length]
    padding = len(model.token_embedding.weight) - ours.vocab_size  # may be another than the checkpoint's
    tokens = torch.nn.functional.pad(weights["token_embedding.weight"][: ours.vocab_size], (0, 0, 0, padding))
    weights["token_embedding.weight"] = weights["head.weight"] = tokens
    own = model.state_dict()
    model.load_state_dict({name: parallel.part(weight, own.get(name)) for name, weight in weights.items()})


def resume(model, optimizer, state, path):
    """Continues from a checkpoint: model, optimizer and generators as they were. Returns the progress."""
    for key in ("context_length", "pad_vocab_to", "optimizer"):
        if getattr(model.config, key) != (theirs := state["config"].get(key, DEFAULTS[key])):
            raise BadInput(
                f"{path} was trained with {key}={theirs}; expected the same to resume; "
                f"to start anew from its weights: --init_from={path}"
            )
    check_shape(model.config, state["config"], path)
    try:
        load_optimizer(optimizer, state)
        load_weights(model, state, path)
        set_generator_states(state["generators"])
    except ValueError as error:
        raise damage(path, error) from None
    return {key: state["progress"][key] for key in PROGRESS}


def load_optimizer(optimizer, state):
    """Puts in what the optimizer and its scaler have learned. Raises ValueError if it is not this optimizer's.

    Hyperparameters come from the config, not from the file.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        learned = {
            index: {name: optim.from_plain(own(value), parameters[index]) for name, value in values.items()}
            for index, values in state["optimizer"].items()
        }
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"its optimizer's state is not this run's: {error}") from None
    expected = first_state(optimizer)
    # Which matrices are in 8 bits depends on the number of processes: they are compared as they are here.
    check_like(expected, learned if optim.in_8_bits(expected) else state["optimizer"], "optimizer")
    optimizer.load_state_dict({"state": learned, "param_groups": groups})
    if scales(optimizer) and state["scaler"]:
        check_like(optimizer.scaler.state_dict(), state["scaler"], "scaler")
        optimizer.scaler.load_state_dict(state["scaler"])


def first_state(optimizer):
    """The state that the optimizer's first step makes, from gradients of 0 at a learning rate of 0, one at a time."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            parameter.grad = None
    state = optimizer.state_dict()["state"]
    optimizer.state.clear()
    return state


def check_like(ours, theirs, where):
    """Raises ValueError unless theirs is as ours: the same keys, types, shapes and dtypes."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict) or ours.keys() != theirs.keys():
            raise ValueError(f"its {where} has other entries than this run's")
        for key in ours:
            check_like(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(ours, torch.Tensor):
        if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ValueError(f"its {where} is not a tensor of {ours.dtype} {tuple(ours.shape)}, as this run's is")
    elif type(ours) is not type(theirs):
        raise ValueError(f"its {where} is no {type(ours).__name__}")


def own(value):
    """A tensor of the file, or a dict of them, in memory of its own."""
    if isinstance(value, dict):
        return {name: own(part) for name, part in value.items()}
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


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
    """Sets this process's; where there were fewer processes, it stays as it was seeded. Raises ValueError."""
    if "cpu" not in states:
        raise ValueError("it has no generator of the cpu")
    for kind, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if kind in states and (kind == "cpu" or torch.cuda.is_available()):
            try:
                rows = torch.atleast_2d(states[kind])  # a state without rows was written before there were processes
                if parallel.rank() < len(rows):
                    set_state(rows[parallel.rank()].clone())  # of a part of a tensor it reads what is before
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"generator of the {kind}: {error}") from None
