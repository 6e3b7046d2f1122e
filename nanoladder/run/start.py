"""Start of a run: its config, from a command line, and its model, new, from its own checkpoint or from elsewhere.

Keys not set by config files or the command line come from the run's start: a resumed run's own config.json, or the
shape of the model that init_from names.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nanoladder import checkpoint, files, parallel
from nanoladder.config import (
    COMMANDS,
    DEFAULTS,
    USAGE,
    Config,
    apply,
    check,
    help_text,
    ladder_files,
    of_earlier,
    parse_arguments,
    typed,
)
from nanoladder.data.datasets import Dataset
from nanoladder.errors import BadInput, reading
from nanoladder.tokenizer.encoding import identify

CONFIG = "config.json"  # in out_dir
OWN_STARTS = ("scratch", "resume", "auto")  # values of init_from that name no model from elsewhere
SCHEDULE = ("learning_rate", "min_lr", "warmup_steps", "lr_decay_steps", "max_steps", "schedule")
INERT_KEYS = ("out_dir", "init_from", "new_data")  # keys that do not affect training


# -- the config


def load_config(argv: list[str], options: Iterable[str] = ()) -> Config:
    """Makes a Config from a command line (without the program's name); raises BadInput.

    `--help` prints all keys, `--usage` the most useful commands. options: names of the script's own options, already
    removed; a misspelled key may be meant as one of them.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    if "--usage" in argv:
        print(USAGE, COMMANDS, sep="\n", file=sys.stderr)
        sys.exit(2)
    paths, tops, given = parse_arguments(argv, options)
    files = [*paths, *ladder_files(tops)]
    values = apply(files, given, DEFAULTS)
    if base := inherited_keys(values, alone=not paths):
        values = apply(files, given, DEFAULTS | base)
    config = Config(**values)
    check(config)
    return config


def inherited_keys(values, alone):
    """Returns the keys, {key: value}, that a run with these values inherits from its start. Raises BadInput.

    alone: if there are no config files, so that a resumed run continues as it was configured.
    """
    if values["init_from"] not in OWN_STARTS:
        return checkpoint.shape_of(values["init_from"])
    folder = Path(values["out_dir"])
    if values["init_from"] == "scratch" or not checkpoint.list_checkpoints(folder):
        return {}
    saved = read_config(folder / CONFIG)
    return {key: saved[key] for key in saved if (key not in INERT_KEYS if alone else key in checkpoint.SHAPE)}


def read_config(path):
    """Returns {key: value} of a run's config.json; {} if there is none. Raises BadInput if it is not a run's config."""
    if not path.exists():
        return {}
    advice = "expected a JSON object of keys: repair it, or remove it and name the run's config files"
    with reading(f"{path} is not the config of a run", advice):
        values = of_earlier({**json.loads(files.read(path))}, path)
        return {key: typed(key, value, path) for key, value in values.items()}


def write_config(folder, config):
    """Writes a run's config.json. Raises OSError."""
    files.write(Path(folder, CONFIG), json.dumps(dataclasses.asdict(config), indent=2) + "\n")


# -- the model


class Start(NamedTuple):
    """A run's start, determined before its model is built.

    source, state: path or name of the model to load, and its dict, whose tensors are memory-mapped; None for new
    weights. origin: as checkpoint.snapshot takes it. former_best: step of the best checkpoint if that was chosen by
    another validation, else 0. message: a text to print.
    """

    origin: dict
    progress: dict
    source: Any = None
    state: Any = None
    resumes: bool = False
    former_best: int = 0
    message: str = ""

    def load(self, model, optimizer, scaler):
        """Loads the weights, and of a run that resumes its whole state, once: frees it. Raises BadInput."""
        if self.resumes:
            checkpoint.resume(model, optimizer, scaler, self.state, self.source)
        elif self.state:
            checkpoint.load_weights(model, self.state, self.source)
        if self.state:
            self.state.clear()


def find_start(config, dataset, device):
    """Returns the Start that init_from names.

    Raises BadInput if there is nothing to resume, if a new run would begin in the out_dir of another, if the dataset
    has another tokenizer than the model or has changed, or if the config has another shape. Collective.
    """
    checkpoints = checkpoint.list_checkpoints(Path(config.out_dir))
    parallel.require_agreement({"checkpoints": [path.name for path in checkpoints]}, f"out_dir={config.out_dir}")
    if config.init_from == "resume" or (config.init_from == "auto" and checkpoints):
        path, state = checkpoint.newest(config.out_dir)
        origin = origin_of(config, dataset, state, path)
        message = check_data(config, origin["data"], state, path)
        checkpoint.check_resumes(config, state, path, device)
        progress, former_best, compared = compare_best(config, origin["data"], state, path)
        as_before = f"as it was configured{changes(config, state['config'])}"
        message = f"continues {path}, step {progress['step']}, {as_before}\n{message}{compared}"
        return Start(origin, progress, path, state, True, former_best, message)
    if checkpoints:
        raise BadInput(
            f"{config.out_dir} holds a run: --init_from=resume continues it; for a new one delete the folder, or "
            "choose another --out_dir"
        )
    return new_start(config, dataset)


def new_start(config: Config, dataset: Dataset) -> Start:
    """Returns the Start of a new run, perhaps from the model that init_from names. Raises BadInput as find_start()."""
    source = config.init_from
    progress = {"step": 0, "best_val_loss": math.inf, "best_step": 0, "interval_loss": 0.0, "interval_steps": 0}
    if source in OWN_STARTS:
        origin = {"tokenizer": identify(dataset.find_tokenizer()), "data": dataset.fingerprint()}
        return Start(origin, progress)
    state = checkpoint.load_model(source)
    origin = origin_of(config, dataset, state, source)
    checkpoint.check_shape(config, state, source)
    return Start(origin, progress, source, state)


def origin_of(config, dataset, state, source):
    """Returns the origin, as checkpoint.snapshot takes it, of a run from load_model(source)'s result, `state`.

    Raises BadInput if the dataset has another tokenizer than the model.
    """
    tokenizer = checkpoint.check_tokenizer(dataset, config.dataset, state, source)
    return {"tokenizer": tokenizer, "data": dataset.fingerprint()}


def check_data(config: Config, data: dict, state: dict, path: Path) -> str:
    """Returns a text to print if the dataset is not that of a checkpoint, else "". data: its fingerprint().

    Raises BadInput if it has the same name, unless new_data is set.
    """
    before = state["data"]
    changed = [name for name in data if data[name] != before.get(name)]
    if not changed:
        return ""
    name, same_name = changed[0], config.dataset == state["config"]["dataset"]
    differ = f"{name} has {data[name]}, not {before.get(name)}"
    message = f"dataset={config.dataset} has other data than those of {path}: {differ}"
    if same_name and not config.new_data:
        raise BadInput(f"{message}; expected the same data, or --new_data=True to continue with these")
    return f"{message}\n"


def compare_best(config, data, state, path):
    """Decides if later validation losses can be compared with that of a run's best checkpoint.

    Returns the progress to begin with, the step of a best checkpoint by another validation or 0, and a text to print.
    data: the dataset's fingerprint().
    """
    progress, windows = state["progress"], (DEFAULTS | state["config"])["eval_windows"]
    reasons = ["other validation data"] * (data["val.bin"] != state["data"].get("val.bin"))
    reasons += [f"eval_windows={config.eval_windows} (was {windows})"] * (config.eval_windows != windows)
    best, step = path.with_name(checkpoint.BEST), progress["best_step"]
    lost = step < progress["step"] and not best.exists()  # if it is this step's, it is linked again
    if not step or not (reasons or lost) or progress["step"] >= config.max_steps:
        return progress, 0, ""
    message = f"{best} is missing"
    if reasons:
        message = f"{', '.join(reasons)}: {best}, of step {step}, becomes {checkpoint.former_best(step)}"
    anew = progress | {"best_val_loss": math.inf, "best_step": 0}
    return anew, step if reasons else 0, f"{message}; the next evaluation is the best so far\n"


def say_rate(start, config, learning_rate):
    """Returns a line if the changed config of a run that resumes makes its learning rate jump; else ""."""
    step = start.progress["step"] + 1
    if not start.resumes or step > config.max_steps:
        return ""
    saved_keys = DEFAULTS | start.state["config"]
    before = dataclasses.replace(config, **{key: typed(key, saved_keys[key], start.source) for key in SCHEDULE})
    old, new = learning_rate(step, before), learning_rate(step, config)
    if old == new:
        return ""
    ends = [each.lr_decay_steps or each.max_steps for each in (before, config)]
    advice = f"; --lr_decay_steps={ends[0]} keeps the decay as it was" if ends[0] != ends[1] else ""
    return f"learning rate of step {step}: {new:.3g}, which would have been {old:.3g}{advice}\n"


def changes(config, before):
    """Names the keys whose values differ from the config of a checkpoint, a dict."""
    before, now = DEFAULTS | before, dataclasses.asdict(config)
    changed = [key for key in now if now[key] != before[key] and key not in INERT_KEYS]
    text = ", ".join(f"{key}={now[key]} (was {before[key]})" for key in changed)
    return f", but {text}" if changed else ""
