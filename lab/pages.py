"""The ladder's stages, and what each changes in the code.

    python ladder.py [list]       the stages in order
    python ladder.py show NAME    the training program as it would be written if the ladder stopped there
    python ladder.py diff NAME    what a stage changes in it; diff A B: what lies between two stages
    python ladder.py docs         writes docs/ladder.md: the ladder as a tutorial

A program that is shown runs from this folder; --stage=NAME tells its header and its checkpoints what it is:
python ladder.py show amp > amp.py && python amp.py config/x.py --stage=amp
"""

import ast
import difflib
import re
import sys
from functools import cache
from pathlib import Path

from lab import summary, tables
from lab.results import read_results
from nanoladder.config import DEFAULTS, stage_files, stage_names
from nanoladder.errors import BadInput

FOLDER = Path(__file__).parents[1]
RESULTS = FOLDER / "results"
MODULES = {"model": "model.py", "train": "train.py"}
PAGE = FOLDER / "docs" / "ladder.md"
OPTIONS = ("compile_scope", "compile_mode", "optimizer_in_backward")  # what is shown has their defaults
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
        case ["docs"]:
            PAGE.parent.mkdir(exist_ok=True)
            PAGE.write_text(page(), encoding="utf-8")
        case _:
            raise BadInput(f"ladder.py {' '.join(argv)}: expected list, show NAME, diff NAME, diff A B or docs")


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


def explanation(name):
    """The rest of a stage's docstring as Markdown: what, why, cost and source, the links behind their titles."""
    text = ast.get_docstring(parse(name)).partition("\n")[2].strip()
    text = re.sub(r"\s+^(What|Why|Cost|Source):", r"\n\n**\1:**", "\n" + text, flags=re.MULTILINE).strip()
    return re.sub(r"^- (.*):\s+(https://\S+)$", r"- [\1](\2)", text, flags=re.MULTILINE)


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
        from lab.fold import fold, merge
    except ModuleNotFoundError:
        raise BadInput("show and diff need libcst: .venv/bin/python -m pip install libcst") from None
    modules = {module: (FOLDER / path).read_text(encoding="utf-8") for module, path in MODULES.items()}
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


INTRODUCTION = """\
# The ladder, rung by rung

A training loop that a beginner writes, and what makes it fast, one change at a time. Every section is one stage:
why it is there, what it costs, and the lines that it changes in the whole program, which is `model.py` and
`train.py` with every choice up to that stage made. The programs are true: a test runs each, and its losses are
those of `python train.py --stage=NAME`, bit for bit.

Lines with a minus go, lines with a plus come, and a line that begins with @@ says in which function. What a stage
gains depends on the machine: the tables say what it gained where it was measured, and `python profile.py
config/reference.py` measures yours. `python train.py` alone is the loop as it stands after chunked_loss; the stages
after it trade speed for memory, and are asked for by their keys, and the last two are for several devices.

Shapes in comments: B sequences, T tokens each, C channels, nh heads of hs channels, V vocabulary.
"""


def page():
    """docs/ladder.md: every stage with its reason, its change to the code and its sources."""
    names = stage_names()
    contents = "\n".join(f"{n}. [{name}](#{name}): {reason(name)}" for n, name in enumerate(names))
    return "\n".join([INTRODUCTION, contents, "", *map(section, [None, *names], names)])


def measured(before, name):
    """What a stage gained on each machine in results/, in Markdown; nothing where none has measured it."""
    rows = []
    for where, found in summaries("ladder"):
        if all("seconds" in found.get(stage, {}) for stage in (before, name)):
            rows.append({"name": where, "note": None, "before": found[before], "after": found[name]})
    columns = {
        "ms/step": lambda row: " → ".join(tables.milliseconds(row[at]["seconds"]) for at in ("before", "after")),
        "speed": lambda row: summary.speedup(row["before"], row["after"]),
        "tensors, GB": lambda row: " → ".join(f"{row[at]['peak'] / 1e9:.3f}" for at in ("before", "after")),
    }
    return tables.markdown(columns, rows) + "\n\n" if rows else ""


def scaled():
    """How the throughput grew with the processes on each machine in results/, in Markdown."""
    found_tables = []
    for where, found in summaries("scaling"):
        rows = list(found.values())
        table = tables.markdown(tables.columns(rows, "scaling"), rows)
        found_tables.append(f"{where}, a batch for each process:\n\n{table}\n\n")
    return "".join(found_tables)


@cache
def summaries(mode):
    """[(where it was measured, {row: summary})] of every results.json that holds a mode."""
    found = []
    for path in sorted(RESULTS.glob("*/*/results.json")):
        results = read_results(path)
        if mode in results["modes"]:
            where = f"{tables.device(results)}: `{' '.join(results['config'])}`"
            found.append((where, {row["name"]: row for row in summary.summarize(results, mode)}))
    return found


def section(before, name):
    """One stage of the page, with its diff to the stage before; for the first, the step that the others change."""
    if before is None:
        command, language, lines = f"show {name}", "python", function(script(name), "train_step")
    else:
        lines = (re.sub("^@@ .* @@", "@@", line).rstrip() for line in diff(before, name))
        command, language, lines = f"diff {name}", "diff", "\n".join(lines).rstrip()
    field = f"`{change(name)}`\n\n" if before else ""
    gain = scaled() if "ddp" in fields(name) and before else measured(before, name)
    return (
        f"## {name}\n\n{reason(name)}\n\n{field}{explanation(name)}\n\n"
        f"```{language}\n{lines}\n```\n\n{gain}`python ladder.py {command}`\n"
    )


def function(source, name):
    """The source of a function."""
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_source_segment(source, node)
