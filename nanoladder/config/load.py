"""Loading: keys are set by config files, then by the stages of the ladders, then by the command line."""

import inspect
import textwrap
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from nanoladder import files
from nanoladder.config.check import check_names, expected, typed
from nanoladder.config.keys import DEFAULTS, HEADINGS, MEANINGS, TYPES
from nanoladder.config.stages import LADDERS, PRESETS
from nanoladder.errors import BadInput, nearest

USAGE = "usage: python train.py [config/x.py ...] [--stage=NAME] [--key=value ...]"
COMMANDS = """
  python train.py config/quickstart.py                         trains in minutes
  python train.py --out_dir=out/quickstart --init_from=resume  continues that run
  python train.py --help                                       lists every key"""
EXPLAINED = """
  --stage=NAME                  stages of config/stages/ up to NAME
  --recipe=NAME                 rungs of config/recipe/ up to NAME
                                `python ladder.py` lists both.

Config files are Python and run with your rights: read one from elsewhere first.
They are applied from left to right, then stages and rungs, then the keys:
  python train.py config/quickstart.py --max_steps=100 --device=cpu
Without them a resumed run continues as it was configured; keys change that:
  python train.py --out_dir=out/quickstart --init_from=resume --max_steps=2000"""


def parse_arguments(argv: Iterable[str], options: Iterable[str] = ()) -> tuple[list[str], dict[str, str], dict]:
    """Splits ["x.py", "--stage=NAME", "--key=value", "--key", "value"] into paths, {"stage": NAME}, {key: typed value}.

    options: names of the script's own options, already removed; offered as corrections of a misspelled key.
    """
    paths, tops, given, unknown = [], {}, {}, []
    rest = iter(argv)
    for word in rest:
        if not word.startswith("-"):
            paths.append(word)
            continue
        key, equals, text = word.lstrip("-").partition("=")
        if key not in LADDERS and key not in DEFAULTS:
            unknown.append(key)
            continue
        if not equals and (text := next(rest, "--")).startswith("--"):
            needed = f"a {key}" if key in LADDERS else f"{expected(key)}, such as --{key}={DEFAULTS[key]}"
            raise BadInput(f"--{key}: no value given; expected {needed}")
        if key in LADDERS:
            tops[key] = text
        else:
            given[key] = typed(key, from_text(key, text), "command line")
    check_names(unknown, "command line", (*options, *LADDERS))
    return paths, tops, given


def from_text(key, text):
    """Converts text from the command line to the key's type; text that does not convert stays as it is."""
    kind = TYPES[key]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def apply(paths: Iterable[Path | str], given: dict, base: Mapping[str, Any]) -> dict:
    """Returns `base`, a dict of all keys, updated by config files and then by the given keys."""
    values = dict(base)
    for path in paths:
        read_file(Path(path), values, given)
    return values | given


class Names(dict):
    """Namespace of a config file: all keys, and the file's own names. Keys from the command line keep their values."""

    def __init__(self, path, values, given):
        super().__init__(values | given)
        self.path, self.given = path, given
        self.unknown = {}  # {name that is not a key: its line}

    def __setitem__(self, name, value):
        line = f"line {inspect.currentframe().f_back.f_lineno}"
        if name in DEFAULTS:
            value = self.given.get(name, typed(name, value, f"{self.path} {line}"))
        elif not (name.startswith("_") or callable(value) or inspect.ismodule(value)):
            self.unknown[name] = line
        super().__setitem__(name, value)


def read_file(path: Path, values: dict, given: dict) -> None:
    """Runs a config file, which is Python, and updates values, a dict of all keys. Raises BadInput.

    The file sees the keys set before it, and the values of the keys on the command line (given):

        learning_rate = 6e-4 * (batch_size / 480) ** 0.5  # square-root scaling, for AdamW (Malladi et al. 2022)

    Here batch_size may come from the command line. runpy cannot do that: it runs a file in a plain dict.
    """
    source, names, failure = read_source(path), Names(path, values, given), None
    try:
        exec(compile(source, path, "exec"), names)
    except Exception as error:
        failure = error
    check_names(names.unknown, path)
    if isinstance(failure, BadInput):
        raise failure
    if failure:  # a SyntaxError names its line itself
        frames = traceback.extract_tb(failure.__traceback__)
        lines = [f" line {frame.lineno}" for frame in frames if frame.filename == str(path)]
        raise BadInput(f"{path}{''.join(lines[-1:])}: {type(failure).__name__}: {failure}")
    values.update({key: names[key] for key in names if key in DEFAULTS})


def read_source(path):
    """Returns the bytes of a config file. Raises BadInput."""
    try:
        source = files.read(path)
    except (OSError, ValueError) as error:
        paths = [*path.parent.glob("*.py"), *PRESETS.glob("*.py")]
        near = nearest(str(path), map(shown, paths), key=lambda name: Path(name).stem)
        reason, expected = getattr(error, "strerror", None) or error, near or "; expected one such as config/gpt2.py"
        raise BadInput(f"config file {path} cannot be read in {Path.cwd()} ({reason}){expected}") from None
    if b"\0" in source:
        line = source[: source.index(b"\0")].count(b"\n") + 1
        raise BadInput(
            f"{path} line {line}: it has a NUL byte; expected Python in UTF-8 (UTF-16 has many: save it anew)"
        )
    return source


def shown(path):
    """Formats a path, relative to the working folder if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def help_text() -> str:
    """Returns the usage, and every key with its default and meaning, under headings."""
    lines = [USAGE + EXPLAINED]
    for key, default in DEFAULTS.items():
        if key in HEADINGS:
            lines += ["", HEADINGS[key]]
        choices = [" | ".join(get_args(TYPES[key]))] if get_origin(TYPES[key]) is Literal else []
        start, indent = f"  {f'{key}={default}':<30}", " " * 32
        for text in (MEANINGS[key], *choices):
            lines.append(textwrap.fill(text, 80, initial_indent=start, subsequent_indent=indent))
            start = indent
    return "\n".join(lines)
