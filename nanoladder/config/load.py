"""Loading: config files, then a stage of the ladder, then the command line set the values of keys."""

import ast
import contextlib
from collections import ChainMap
from pathlib import Path
from typing import Literal, get_args, get_origin

from nanoladder import files
from nanoladder.config.check import expected, known, typed
from nanoladder.config.expressions import evaluate, short
from nanoladder.config.keys import DEFAULTS, HEADINGS, MEANINGS, TYPES
from nanoladder.config.stages import stage_files
from nanoladder.errors import BadInput, nearest

USAGE = """\
usage: python train.py [config/x.py ...] [--stage=NAME] [--key=value | --key value ...]

Config files are applied from left to right, then the stages up to --stage, then the keys:
  python train.py config/quickstart.py --max_steps=100 --device=cpu
Without config files, a resumed run continues as it was configured; keys change it:
  python train.py --out_dir=out/quickstart --init_from=resume --max_steps=2000"""


def parse_arguments(argv, options=()):
    """Splits ["x.py", "--key=value", "--key", "value"] into the paths of files and {key: typed value}.

    options: names of the script's own options, which it has already taken out; a misspelled key may be one of them.
    """
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


def apply(paths, given, base):
    """Returns base, a dict of all keys, changed by config files, then by the stages, then by the given keys."""
    values = dict(base)
    for path in paths:
        read_assignments(Path(path), values, given)
    if (stage := given.get("stage", values["stage"])) != base["stage"]:
        for file in stage_files(stage):
            read_assignments(file, values, given)
    return values | given


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
        question = ""
        if isinstance(error, FileNotFoundError):
            reason, others = f"no such file in {path.absolute().parent}", sorted(map(str, path.parent.glob("*.py")))
            question = nearest(str(path), others, key=lambda name: Path(name).stem)
        question = question or "; expected one such as config/gpt2.py"
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
