"""From the command line and config files to a Config."""

import ast
import sys
import textwrap
from collections import ChainMap
from pathlib import Path
from typing import Literal, get_args, get_origin

from nanoladder import files
from nanoladder.config.check import check, expected, known, typed
from nanoladder.config.expressions import evaluate, short
from nanoladder.config.keys import DEFAULTS, MEANINGS, TYPES, Config
from nanoladder.config.stages import stage_files
from nanoladder.errors import BadInput


def load_config(argv):
    """Command line (without the program's name) -> Config. Raises BadInput; `--help` prints every key and exits."""
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    paths, given = parse_arguments(argv)
    values = dict(DEFAULTS)
    for path in paths:
        read_assignments(Path(path), values, given)
    if stage := given.get("stage", values["stage"]):
        for file in stage_files(stage):
            read_assignments(file, values, given)
    config = Config(**{**values, **given})
    check(config)
    return config


def parse_arguments(argv):
    """Splits ["x.py", "--key=value", "--key", "value"] into the files' paths and {key: typed value}."""
    paths, given = [], {}
    rest = iter(argv)
    for word in rest:
        if not word.startswith("--"):
            paths.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        known(key, "command line")
        if not equals and (text := next(rest, "--")).startswith("--"):
            raise BadInput(f"--{key}: no value given; expected {expected(key)}, such as --{key}={DEFAULTS[key]}")
        given[key] = typed(key, from_text(key, text), "command line")
    return paths, given


def read_assignments(path, values, given):
    """Applies a file of `key = expression` lines to values; expressions may use the keys set before.

    A command-line value (given) wins within expressions too.
    """
    try:
        source = files.read(path).decode()
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BadInput(f"{path} line {error.lineno or 1}: {error.msg}; expected lines like n_layer = 12") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "nested too deeply"
        name = short(str(path))
        raise BadInput(f"config file {name} cannot be read ({reason}); expected one such as config/gpt2.py") from None
    for statement in tree.body:
        where = f"{path} line {statement.lineno}"
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                continue
            case ast.Assign(targets=[ast.Name(id=key)], value=expression):
                known(key, where)
            case _:
                raise BadInput(f"{where}: only plain assignments are allowed; expected a line like n_layer = 12")
        try:
            value = evaluate(expression, ChainMap(given, values))
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            text = short(ast.get_source_segment(source, expression))
            raise BadInput(f"{where}: `{text}`: {error}; expected a value or arithmetic on keys") from None
        values[key] = typed(key, value, where)


def from_text(key, text):
    """A command line's text as the key's type where it reads as one, else the text itself."""
    kind = TYPES[key]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def help_text():
    lines = [
        "usage: python train.py config/x.py [more.py ...] [--stage=NAME] [--key=value | --key value ...]",
        "",
        "keys, with their defaults:",
    ]
    for key, default in DEFAULTS.items():
        choices = f" ({' | '.join(get_args(TYPES[key]))})" if get_origin(TYPES[key]) is Literal else ""
        text = textwrap.wrap(MEANINGS[key] + choices, 64)
        lines.append(f"  {f'{key}={default}':<32}  {text[0]}")
        lines += [" " * 36 + line for line in text[1:]]
    return "\n".join(lines)
