"""Loading: a run's newest intact checkpoint, its weights alone or its full state; models from any source.

A source names a model: hf:NAME or hf:FOLDER, the path of a nanoGPT ckpt.pt, or the path of a checkpoint.
"""

import contextlib
import dataclasses
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from tiktoken import Encoding

from model import GPT
from nanoladder import parallel
from nanoladder.checkpoint import interop, slices
from nanoladder.checkpoint.contents import check_contents
from nanoladder.checkpoint.folder import BEST, LAST, best_or_last, list_checkpoints
from nanoladder.checkpoint.format import Damaged, reading
from nanoladder.checkpoint.shape import SHAPE, config_of
from nanoladder.checkpoint.state import check_generators, load_optimizer, set_generator_states
from nanoladder.config import DEFAULTS, Config, of_earlier
from nanoladder.data.datasets import Dataset
from nanoladder.errors import BadInput
from nanoladder.tokenizer.encoding import DESCRIPTION, RANKS, identify
from nanoladder.tokenizer.existing import existing_tokenizer, how_to_prepare
from nanoladder.tokenizer.hub import HUB


def newest(folder: Path | str) -> tuple[Path, dict]:
    """Returns the path and the dict of a run's newest intact checkpoint. Warns about newer ones that are damaged.

    Raises BadInput if there is none.
    """
    folder, damaged = Path(folder), []
    paths = list_checkpoints(folder)
    for path in paths or [folder / LAST]:
        state, error = {}, None
        try:
            state = load(path, verify=True)
        except BadInput as caught:
            error = isinstance(caught, Damaged), str(caught)
        errors = sorted(filter(None, parallel.gather_objects(error)))  # those of files that cannot be read come first
        if not errors:
            for line in damaged:
                print(f"warning: {line}: continuing from {path.name}, step {state['progress']['step']}")
            return path, state
        if not errors[0][0]:
            raise BadInput(errors[0][1])
        damaged.append(errors[0][1])
    other = f"choose another --out_dir, or delete {folder}" if paths else "leave out --init_from"
    raise BadInput("; ".join([*damaged, f"for a new run {other}"]))


def load(path: Path | str, verify: bool = False) -> dict:
    """Returns a checkpoint's dict. Its tensors are memory-mapped or, of a divided model, Sliced.

    verify: reads the slices, too; each of several processes reads a part of them. Raises Damaged if the checkpoint is
    incomplete or its contents do not fit its config, and BadInput if its config has unknown keys.
    """
    if not Path(path).is_file():
        raise Damaged(f"no checkpoint at {path}; expected a file such as out/x/{LAST}, nanoGPT's ckpt.pt, or hf:gpt2")
    with reading(path):
        state, found = slices.read(path)
        config = {**state["config"]}
    state["config"] = of_earlier(config, path)
    with reading(path):
        check_contents(state)
    if verify and found:
        found.verify(parallel.rank(), parallel.world_size())
    return state


def check_shape(ours: Config, state: dict, path: Path | str) -> None:
    """Raises BadInput, which names the keys to set, unless a Config has the shape of a checkpoint's model.

    Its context_length may be shorter.
    """
    saved = config_of(state)
    wrong = [key for key in SHAPE if getattr(ours, key) != getattr(saved, key)]
    if ours.context_length < saved.context_length:
        wrong.remove("context_length")
    if wrong:
        given = " ".join(f"{key}={getattr(ours, key)}" for key in wrong)
        flags = " ".join(f"--{key}={getattr(saved, key)}" for key in wrong)
        raise BadInput(f"the config has {given}, unlike the model of {path}; expected {flags}")


def load_weights(model: torch.nn.Module, state: dict, path: Path | str) -> None:
    """Loads a checkpoint's weights into the model; with a shorter context_length, only the first positions. Collective.

    Raises BadInput as check_shape() does.
    """
    ours: Any = model.config
    check_shape(ours, state, path)
    weights = dict(state["model"])
    if ours.position == "learned":
        positions = weights["position_embedding.weight"]
        weights["position_embedding.weight"] = positions.narrow(0, 0, ours.context_length)
    head = weights[parallel.TIED if ours.tie_embeddings else "head.weight"]
    weights["head.weight"] = head.narrow(0, 0, ours.vocab_size)  # without padding: ours may differ
    if ours.tie_embeddings:
        weights["token_embedding.weight"] = weights["head.weight"]
    for name, target in model.state_dict().items():  # in a pipeline, of this process's stages
        parallel.copy_part(weights[name], target, name)


def check_resumes(config: Config, state: dict, path: Path, device: torch.device) -> None:
    """Raises BadInput unless a run with this Config can resume from the checkpoint on this device."""
    for key in ("context_length", "pad_vocab_to", "optimizer"):
        if getattr(config, key) != (saved := state["config"].get(key, DEFAULTS[key])):
            raise BadInput(
                f"{path} was trained with {key}={saved}; expected the same to resume; "
                f"to start a new run from its weights: --init_from={path}"
            )
    check_shape(config, state, path)
    with reading(path):
        check_generators(state["generators"], device)


def resume(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, state: dict, path: Path
) -> None:
    """Restores model, optimizer, loss scale and generators from a checkpoint that passes check_resumes()."""
    load_weights(model, state, path)
    load_optimizer(model, optimizer, state["optimizer"])
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    set_generator_states(state["generators"], next(model.parameters()).device)


# -- models from any source


def add_source(parser: ArgumentParser) -> None:
    """Adds the options that name a script's model: --out_dir and --checkpoint, or --model."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--out_dir", default="out/quickstart", help="run folder (default: %(default)s)")
    group.add_argument("--model", help="a model from elsewhere instead: hf:gpt2, hf:FOLDER or a ckpt.pt of nanoGPT")
    parser.add_argument("--checkpoint", choices=["best", "last"], help="checkpoint of the run (default: best)")


def source_of(options: Namespace) -> str:
    """Returns the source that the options of add_source() name. Raises BadInput if there is no such run."""
    if options.model and options.checkpoint:
        raise BadInput(f"--checkpoint={options.checkpoint} is for a run; expected --out_dir with it, not --model")
    if options.model and Path(options.model).is_dir():
        run = any(Path(options.model, name).exists() for name in (LAST, BEST))
        advice = f"--out_dir={options.model}" if run else f"--model={HUB}{options.model}"
        raise BadInput(f"--model={options.model} is a folder; expected {advice}")
    return options.model or str(best_or_last(options.out_dir, options.checkpoint or "best"))


def load_model(source: Path | str) -> dict:
    """Returns a dict with a model's "config", as config_of takes it, and its weights as "model", on the CPU.

    The weights of a divided model are Sliced in processes that divide it, too; else they are read at once. Raises
    BadInput.
    """
    while True:
        file, state = inode(source), find_model(str(source))
        try:
            if not parallel.mesh().is_divided:
                state["model"] = {name: weight[...] for name, weight in state["model"].items()}
            return state
        except Damaged:
            if inode(source) == file:
                raise  # else its run has replaced the checkpoint meanwhile, and removed its slices


def find_model(source):
    """Returns load_model(source)'s result, of which no weights have been read."""
    if source.startswith(HUB):
        return interop.read_huggingface(source.removeprefix(HUB))
    if source.endswith(".pt") and Path(source).is_file():
        return interop.read_nanogpt(source)
    return load(source)


def inode(path):
    """Number of the file at a path; None if there is none."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino


def shape_of(source: str) -> dict:
    """Returns the config keys that fix the shape of a source's model, {key: value}. Raises BadInput."""
    config = find_model(source)["config"]
    return {key: config[key] for key in SHAPE if key in config}


def load_gpt(source: Path | str) -> GPT:
    """Returns a source's GPT, on the CPU. Raises BadInput."""
    return build_gpt(load_model(source), source)


def build_gpt(state: dict, source: Path | str, context_length: int = 0) -> GPT:
    """Builds the GPT from load_model(source)'s result, `state`, with another context_length unless that is 0."""
    config = config_of(state)
    model = GPT(dataclasses.replace(config, context_length=context_length or config.context_length))
    load_weights(model, state, source)
    return model


# -- the models' tokenizers


def check_tokenizer(dataset: Dataset, name: str, state: dict, source: Path | str) -> dict:
    """Returns the identity, if known, of a source's and a dataset's common tokenizer, as snapshot() takes it.

    name: the dataset's. state: load_model()'s result. Raises BadInput if the tokenizers differ or, if only the
    dataset's is known, if their numbers of tokens differ.
    """
    ours, expected, n_tokens = dataset.find_tokenizer(), state.get("tokenizer", {}), state["config"]["vocab_size"]
    if "tokenizer" not in state:
        with contextlib.suppress(BadInput):  # none, or one that tiktoken cannot represent
            expected = identify(tokenizer_of(source, state))
    if ours is None:
        return expected
    if identify(ours) != expected if expected else ours.n_vocab != n_tokens:
        other = state["config"].get("dataset", name)
        advice = f"--dataset={other}, or " if other != name else ""
        raise BadInput(
            f"dataset={name} has another tokenizer ({ours.name}, {ours.n_vocab} tokens) than the one that the "
            f"model of {source} was trained with; expected {advice}data prepared with that "
            f"model's tokenizer: {advice_on(source, state)}"
        )
    return identify(ours)


def tokenizer_of(source: Path | str, state: dict) -> Encoding:
    """Returns the tokenizer, a tiktoken.Encoding, that lies beside a source's weights.

    state: load_model(source)'s result. Raises BadInput if there is no tokenizer, it has more tokens than the model, or
    the checkpoint records another one.
    """
    vocab_size, recorded = state["config"]["vocab_size"], state.get("tokenizer")
    place = place_of(source)
    tokenizer = existing_tokenizer(place)
    if tokenizer.n_vocab > vocab_size:
        raise BadInput(
            f"tokenizer in {place}: {tokenizer.n_vocab} tokens, more than the model's vocab_size={vocab_size}; "
            "expected the tokenizer that the model was trained with"
        )
    if recorded and identify(tokenizer) != recorded:
        raise BadInput(
            f"tokenizer in {place}: not the one that the model of {source} was trained with; expected copies of "
            f"{DESCRIPTION} and {RANKS} from the folder of its dataset"
        )
    return tokenizer


def place_of(source):
    """Returns the place of a source's tokenizer, as existing_tokenizer() takes it: hf:NAME, or the weights' folder."""
    return source if str(source).startswith(HUB) else Path(source).parent


def advice_on(source, state):
    """Returns the command that prepares a text with a source's tokenizer. state: load_model(source)'s result."""
    try:
        tokenizer_of(source, state)
    except BadInput:  # nanoGPT's ckpt.pt has none
        gpt2 = state["config"]["vocab_size"] == interop.GPT2_VOCABULARY
        return how_to_prepare("gpt2" if gpt2 else "PATH") + (", if it is GPT-2's" if gpt2 else "")
    return how_to_prepare(place_of(source))
