"""Loading: the newest intact checkpoint of a run, its weights alone, or its full state."""

from pathlib import Path

import torch

from nanoladder import machine, parallel
from nanoladder.checkpoint import format
from nanoladder.checkpoint.check import SHAPE, Damaged, config_of, reading
from nanoladder.checkpoint.folder import LAST, found
from nanoladder.checkpoint.state import load_optimizer, set_generator_states
from nanoladder.config import DEFAULTS, known
from nanoladder.errors import BadInput


def newest(folder):
    """Returns the path and the dict of a run's newest intact checkpoint. Warns about newer ones that are damaged.

    Raises BadInput if there is none.
    """
    folder, damaged = Path(folder), []
    for path in found(folder) or [folder / LAST]:
        try:
            state = load(path)
        except Damaged as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            print(f"warning: {line}: continuing from {path.name}, step {state['progress']['step']}")
        return path, state
    raise BadInput("; ".join([*damaged, f"for a new run choose another --out_dir, or delete {folder}"]))


def load(path):
    """Returns a checkpoint's dict, whose tensors are memory-mapped.

    Raises Damaged unless the file is a whole one, and BadInput if its config has keys that there are no more.
    """
    if not Path(path).is_file():
        raise Damaged(f"no checkpoint at {path}; expected a file such as out/x/{LAST}, nanoGPT's ckpt.pt, or hf:gpt2")
    with reading(path):
        state = format.read(path)
        keys = [*state["config"]]
    for key in keys:
        known(key, path)
    return state


def load_weights(model, state, path):
    """Loads a checkpoint's weights into the model; a shorter context_length takes the first positions. Collective.

    Raises BadInput, which names the keys to set, if shapes differ otherwise.
    """
    ours, theirs = model.config, config_of(state)
    wrong = [key for key in SHAPE if getattr(ours, key) != getattr(theirs, key)]
    if ours.context_length < theirs.context_length:
        wrong.remove("context_length")
    if wrong:
        found = " ".join(f"{key}={getattr(ours, key)}" for key in wrong)
        flags = " ".join(f"--{key}={getattr(theirs, key)}" for key in wrong)
        raise BadInput(f"the config has {found}, unlike the model of {path}; expected {flags}")
    weights = dict(state["model"])
    if ours.position == "learned":
        weights["position_embedding.weight"] = weights["position_embedding.weight"][: ours.context_length]
    padding = ours.padded_vocab_size - ours.vocab_size  # the checkpoint's may differ
    head = weights[parallel.TIED if ours.tie_embeddings else "head.weight"][: ours.vocab_size]
    weights["head.weight"] = torch.nn.functional.pad(head, (0, 0, 0, padding))
    if ours.tie_embeddings:
        weights["token_embedding.weight"] = weights["head.weight"]
    for name, own in model.state_dict().items():  # in a pipeline, of this process's stages
        parallel.local(own).copy_(parallel.local_part(weights[name], own, name))  # reads no more of the file


def resume(model, optimizer, state, path):
    """Restores model, optimizer, loss scale and generators from a checkpoint. Returns the progress dict.

    Raises BadInput if the run's config does not match the checkpoint's.
    """
    for key in ("context_length", "pad_vocab_to", "optimizer"):
        if getattr(model.config, key) != (theirs := state["config"].get(key, DEFAULTS[key])):
            raise BadInput(
                f"{path} was trained with {key}={theirs}; expected the same to resume; "
                f"to start a new run from its weights: --init_from={path}"
            )
    load_weights(model, state, path)
    load_optimizer(model, optimizer, state["optimizer"])
    scaler = machine.scaler_of(model)
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    set_generator_states(state["generators"], next(model.parameters()).device)
    return state["progress"]
