"""Loading: config files, then a stage of the ladder, then the command line make a Config."""

import ast
import contextlib
import sys
from collections import ChainMap
from pathlib import Path
from typing import Literal, get_args, get_origin

from nanoladder import files
from nanoladder.config.check import check, expected, known, typed
from nanoladder.config.expressions import evaluate, short
from nanoladder.config.keys import DEFAULTS, HEADINGS, MEANINGS, TYPES, Config
from nanoladder.config.stages import stage_files
from nanoladder.errors import BadInput, nearest

USAGE = """\
usage: python train.py [config/x.py ...] [--stage=NAME] [--key=value | --key value ...]

Config files are applied from left to right, then the stages up to --stage, then the keys:
  python train.py config/quickstart.py --max_steps=100 --device=cpu"""


def load_config(argv, options=()):
    """Makes a Config of a command line (without the program's name); raises BadInput. `--help` prints all keys.

    options: names of the script's own options, which it has already taken out; a misspelled key may be one of them.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    paths, given = parse_arguments(argv, options)
    values = dict(DEFAULTS)
    for path in paths:
        read_assignments(Path(path), values, given)
    if stage := given.get("stage", values["stage"]):
        for file in stage_files(stage):
            read_assignments(file, values, given)
    config = Config(**{**values, **given})
    check(config)
    return config


def parse_arguments(argv, options=()):
    """Splits ["x.py", "--key=value", "--key", "value"] into the paths of files and {key: typed value}."""
    paths, texts, given = [], [], {}
    rest = iter(argv)
    for word in rest:
        if not word.startswith("--"):
            if word.startswith("-"):
                raise BadInput(f"{short(word)}: one dash; expected -{short(word)}, or --help")
            paths.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals and (text := next(rest, "--")).startswith("--"):
            text = None
        texts.append((key, text))
    for key, text in texts:
        known(key, "command line", dict(texts), options)
        if text is None:
            raise BadInput(f"--{key}: no value given; expected {expected(key)}, such as --{key}={DEFAULTS[key]}")
        given[key] = typed(key, from_text(key, text), "command line")
    return paths, given


def read_assignments(path, values, given):
    """Applies a file of `key = expression` lines to values, a dict of all keys; raises BadInput.

    Expressions see the keys set before, and of those on the command line (given) the final values.
    """
    try:
        source = files.read(path).decode()
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BadInput(f"{path} line {error.lineno or 1}: {error.msg}; expected lines like n_layer = 12") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "nested too deeply"
        others = map(str, Path(path).parent.glob("*.py")) if isinstance(error, FileNotFoundError) else ()
        question = (
            nearest(str(path), sorted(others), key=lambda name: Path(name).stem)
            or "; expected one such as config/gpt2.py"
        )
        raise BadInput(f"config file {short(str(path))} cannot be read ({reason}){question}") from None
    together = constants(tree)
    for statement in tree.body:
        where = f"{path} line {statement.lineno}"
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                continue
            case ast.Assign(targets=[ast.Name(id=key)], value=expression):
                known(key, where, together)
            case _:
                raise BadInput(f"{where}: only plain assignments are allowed; expected a line like n_layer = 12")
        try:
            value = evaluate(expression, ChainMap(given, values))
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            text = short(ast.get_source_segment(source, expression))
            raise BadInput(f"{where}: `{text}`: {error}; expected a value or arithmetic on keys") from None
        values[key] = typed(key, value, where)


def constants(tree):
    """{key: value} of the assignments of a config file whose values do not depend on other keys."""
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            with contextlib.suppress(ValueError, TypeError, ArithmeticError, RecursionError):
                found[statement.targets[0].id] = evaluate(statement.value, {})
    return found


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


def help_text():
    """The usage, and every key with its default and meaning, under headings."""
    lines = [USAGE]
    for key, default in DEFAULTS.items():
        if key in HEADINGS:
            lines += ["", HEADINGS[key]]
        lines.append(f"  {f'{key}={default}':<29}{MEANINGS[key]}")
        if get_origin(TYPES[key]) is Literal:
            lines.append(" " * 31 + " | ".join(get_args(TYPES[key])))
    return "\n".join(lines)
