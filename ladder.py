"""The ladder's stages, and what each changes in the code.

    python ladder.py [list]       the stages in order
    python ladder.py show NAME    the training program as it would be written if the ladder stopped there
    python ladder.py diff NAME    what a stage changes in it; diff A B: what lies between two stages

A program that is shown runs from this folder; --stage=NAME tells its header and its checkpoints what it is:
python ladder.py show amp > amp.py && python amp.py config/x.py --stage=amp
"""

import ast
import difflib
import sys
from functools import cache
from pathlib import Path

from config import DEFAULTS, BadInput, run, stage_files, stage_names

FOLDER = Path(__file__).parent
OPTIONS = ("compile_scope", "compile_mode")  # of a stage; what is shown has their defaults
DEFINITIONS = ast.ClassDef | ast.FunctionDef
COLOURS = {"@": "\033[36m", "-": "\033[31m", "+": "\033[32m"}


def main(argv):
    match argv:
        case [] | ["list"]:
            print_list()
        case ["show", name]:
            print(script(name), end="")
        case ["diff", name]:
            position = len(stage_files(name)) - 1
            if position == 0:
                raise BadInput(f"{name} is the first stage; expected `python ladder.py show {name}`, or a later stage")
            print_diff(diff(stage_names()[position - 1], name))
        case ["diff", a, b]:
            print_diff(diff(a, b))
        case _:
            raise BadInput(f"ladder.py {' '.join(argv)}: expected list, show NAME, diff NAME or diff A B")


def print_list():
    rows = [(name, change(name), reason(name)) for name in stage_names()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, text, why in rows:
        print(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {why}")


def print_diff(lines):
    for line in lines:
        colour = COLOURS.get(line[0]) if sys.stdout.isatty() else None
        print(f"{colour}{line}\033[0m" if colour else line)


def parse(name):
    """The syntax tree of a stage's file."""
    return ast.parse(stage_files(name)[-1].read_text(encoding="utf-8"))


def fields(name):
    """{field: expression} of what a stage's file assigns."""
    assignments = [node for node in parse(name).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in assignments}


def reason(name):
    """The first line of a stage's docstring."""
    return ast.get_docstring(parse(name)).splitlines()[0]


def change(name):
    """What a stage sets, "field: from → to"; nothing for naive."""
    naive = fields("naive")
    changed = {} if name == "naive" else fields(name)
    return ", ".join(f"{field}: {naive[field]} → {value}" for field, value in changed.items())


@cache
def script(name):
    """model.py and train.py as one program, with every field of the ladder folded to its value at a stage."""
    values = {key: repr(DEFAULTS[key]) for key in OPTIONS}
    for stage in stage_names()[: len(stage_files(name))]:
        values |= fields(stage)
    try:
        from fold import fold, merge
    except ModuleNotFoundError:
        raise BadInput("show and diff need libcst: .venv/bin/python -m pip install libcst") from None
    modules = {module: (FOLDER / f"{module}.py").read_text(encoding="utf-8") for module in ("model", "train")}
    return fold(merge(modules), values)


def diff(a, b):
    """The lines of a unified diff of two stages' programs, each hunk headed by the function that it begins in."""
    old, new = script(a).splitlines(), script(b).splitlines()
    for hunk in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(n=2):
        _, i, j, k, m = next(change for change in hunk if change[0] != "equal")
        where = enclosing(new, k, m) if m > k else enclosing(old, i, j)
        (_, i, _, k, _), (_, _, j, _, m) = hunk[0], hunk[-1]
        yield f"@@ -{i + 1},{j - i} +{k + 1},{m - k} @@ {where}".rstrip()
        for kind, i, j, k, m in hunk:
            if kind == "equal":
                yield from (f" {line}" for line in old[i:j])
            else:
                yield from (f"-{line}" for line in old[i:j])
                yield from (f"+{line}" for line in new[k:m])


def enclosing(lines, start, end):
    """The class or function, such as GPT.forward, of the first line from start to end that is not blank."""
    line = next((n for n in range(start, end) if lines[n]), start) + 1
    definitions = (node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, DEFINITIONS))
    return ".".join(node.name for node in definitions if node.lineno <= line <= node.end_lineno)


if __name__ == "__main__":
    run(main)
