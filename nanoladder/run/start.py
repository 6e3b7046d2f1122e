"""Start of a run: its config, from a command line, and its model, new, from its own checkpoint or from elsewhere.

Keys not set by config files or the command line come from the run's start: a resumed run's own config.json, or the
shape of the model that init_from names.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

from nanoladder import checkpoint, files
from nanoladder.config import DEFAULTS, Config, apply, check, help_text, ladder_files, parse_arguments, saved, typed
from nanoladder.data.tokenizer import identify
from nanoladder.errors import BadInput, reading

CONFIG = "config.json"  # in out_dir
OWN_STARTS = ("scratch", "resume", "auto")  # values of init_from that name no model from elsewhere
OF_A_COMMAND = ("out_dir", "init_from")  # keys that do not affect training


# -- the config


def load_config(argv, options=()):
    """Makes a Config from a command line (without the program's name); raises BadInput. `--help` prints all keys.

    options: names of the script's own options, already removed; a misspelled key may be meant as one of them.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    paths, tops, given = parse_arguments(argv, options)
    files = [*paths, *ladder_files(tops)]
    values = apply(files, given, DEFAULTS)
    if base := keys_of_start(values, alone=not paths):
        values = apply(files, given, DEFAULTS | base)
    config = Config(**values)
    check(config)
    return config


def keys_of_start(values, alone):
    """Returns the keys, {key: value}, that a run with these values inherits from its start. Raises BadInput.

    alone: if there are no config files, so that a resumed run continues as it was configured.
    """
    if values["init_from"] not in OWN_STARTS:
        return checkpoint.shape_of(values["init_from"])
    folder = Path(values["out_dir"])
    if values["init_from"] == "scratch" or not checkpoint.found(folder):
        return {}
    own = read_config(folder / CONFIG)
    return own if alone else {key: own[key] for key in checkpoint.SHAPE if key in own}


def read_config(path):
    """Returns {key: value} of a run's config.json; {} if there is none. Raises BadInput if it is not a run's config."""
    if not path.exists():
        return {}
    advice = "expected a JSON object of keys: repair it, or remove it and name the run's config files"
    with reading(f"{path} is not the config of a run", advice):
        values = saved({**json.loads(files.read(path))}, path)
        return {key: typed(key, value, path) for key, value in values.items()}


def write_config(folder, config):
    """Writes a run's config.json. Raises OSError."""
    files.write(Path(folder, CONFIG), json.dumps(dataclasses.asdict(config), indent=2) + "\n")


# -- the model


def begin(config, dataset, model, optimizer):
    """Loads model and optimizer according to init_from.

    Returns the progress dict and the tokenizer's identity, if known, as checkpoint.snapshot takes them, and a text to
    print. Raises BadInput if there is nothing to resume, if a new run would begin in the out_dir of another, or if
    the dataset has another tokenizer than the model.
    """
    found = checkpoint.found(Path(config.out_dir))
    if config.init_from == "resume" or (config.init_from == "auto" and found):
        path, state = checkpoint.newest(config.out_dir)
        tokenizer = checkpoint.check_tokenizer(dataset, config.dataset, state, path)
        progress = checkpoint.resume(model, optimizer, state, path)
        said = f"continues {path}, step {progress['step']}, as it was configured{changes(config, state['config'])}\n"
        if progress["step"] >= config.max_steps:
            said += f"{path} is at step {progress['step']}, max_steps={config.max_steps}: nothing is left to train\n"
        return progress, tokenizer, said
    if found:
        raise BadInput(
            f"{config.out_dir} holds a run: --init_from=resume continues it; for a new one delete the folder, or "
            "choose another --out_dir"
        )
    progress = {"step": 0, "best_val_loss": math.inf, "interval_loss": 0.0, "interval_steps": 0}
    return progress, begin_new(config, dataset, model), ""


def begin_new(config, dataset, model):
    """Loads the weights of the model that init_from names, if it names one. Returns the tokenizer, as begin() does."""
    source = config.init_from
    if source in OWN_STARTS:
        return identify(dataset.find_tokenizer())
    state = checkpoint.load_model(source)
    tokenizer = checkpoint.check_tokenizer(dataset, config.dataset, state, source)
    checkpoint.load_weights(model, state, source)
    return tokenizer


def changes(config, before):
    """Names the keys whose values differ from the config of a checkpoint, a dict."""
    before, now = DEFAULTS | before, dataclasses.asdict(config)
    changed = [key for key in now if now[key] != before[key] and key not in OF_A_COMMAND]
    text = ", ".join(f"{key}={now[key]} (was {before[key]})" for key in changed)
    return f", but {text}" if changed else ""
