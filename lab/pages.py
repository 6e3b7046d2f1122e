"""Programs of the ladder's stages, the diffs between them, and docs/ladder.md, which prints both."""

import ast
import difflib
import re
from functools import cache
from pathlib import Path

from lab import summary, tables
from lab.results import read_results
from nanoladder import files
from nanoladder.config import DEFAULTS, stage_files, stage_names
from nanoladder.config.stages import fields, parse, reason
from nanoladder.errors import BadInput

FOLDER = Path(__file__).parents[1]
RESULTS = FOLDER / "results"
MODULES = {"model": "model.py", "train": "train.py"}
PAGE = FOLDER / "docs" / "ladder.md"
OPTIONS = ("compile_scope", "compile_mode", "optimizer_in_backward", "freeze")  # shown programs use their defaults
DEFINITIONS = ast.ClassDef | ast.FunctionDef
SCALING = {  # stages of several processes: the mode that measures them
    "ddp": "scaling",
    "shard": "scaling-shard",
    "tensor_parallel": "scaling-tensor",
    "context_parallel": "scaling-context",
    "pipeline_parallel": "scaling-pipeline",
}


def explanation(name):
    """Returns the rest of a stage's docstring as Markdown: what, why, cost, and sources as titled links."""
    text = ast.get_docstring(parse(name)).partition("\n")[2].strip()
    text = re.sub(r"\s+^(What|Why|Cost|Source):", r"\n\n**\1:**", "\n" + text, flags=re.MULTILINE).strip()
    return re.sub(r"^- (.*):\s+(https://\S+)$", r"- [\1](\2)", text, flags=re.MULTILINE)


def change(name):
    """Describes the assignment of a stage, "field: from → to"; empty for naive."""
    naive = fields("naive")
    changed = {} if name == "naive" else fields(name)
    return ", ".join(f"{field}: {naive[field]} → {value}" for field, value in changed.items())


@cache
def script(name):
    """Returns model.py and train.py as one program, with every ladder field folded to its value at a stage.

    Raises BadInput for an unknown stage, or if libcst is missing.
    """
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
    """Yields the unified diff of two stages' programs; each hunk's header names the function of its first change."""
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
    """Returns the class or function, such as GPT.forward, of the first nonblank line in lines[start:end]."""
    line = next((n for n in range(start, end) if lines[n]), start) + 1
    definitions = (node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, DEFINITIONS))
    return ".".join(node.name for node in definitions if node.lineno <= line <= node.end_lineno)


INTRODUCTION = """\
# The ladder, rung by rung

A beginner's training loop, made fast one change at a time. Each section is one stage: its purpose, its cost, and the
lines that it changes in the program, which is `model.py` and `train.py` with the stages up to that one and no others.
A test runs each program and compares its losses with `python train.py --stage=NAME`, bit for bit.

Each diff marks removed lines with a minus, added lines with a plus, and the function with @@. The gain of a stage
depends on the machine: the tables list what was measured, and `python profile.py config/reference.py` measures your
machine. The defaults of `python train.py` are the stages up to chunked_loss. The later stages trade speed for memory
and are enabled by their keys; the last five, from ddp on, need several devices.

Shapes in comments: B sequences, T tokens each, C channels, nh heads of hs channels, V vocabulary.
"""


def write():
    """Writes docs/ladder.md."""
    PAGE.parent.mkdir(exist_ok=True)
    files.write(PAGE, page())


def page():
    """Returns docs/ladder.md: each stage with its reason, its change to the code and its sources."""
    names = stage_names()
    contents = "\n".join(f"{n}. [{name}](#{name}): {reason(name)}" for n, name in enumerate(names))
    return "\n".join([INTRODUCTION, contents, "", *map(section, [None, *names], names)])


def measured(before, name):
    """Returns a Markdown table of a stage's gain on each machine in results/; empty if it was not measured."""
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


def scaled(mode):
    """Returns Markdown tables of throughput by number of processes, one for each machine in results/."""
    found_tables, batches = [], "per process" if mode in tables.PER_PROCESS else "for all processes"
    for where, found in summaries(mode):
        rows = list(found.values())
        table = tables.markdown(tables.columns(rows, mode), rows)
        found_tables.append(f"{where}, one batch {batches}:\n\n{table}\n\n")
    return "".join(found_tables)


@cache
def summaries(mode):
    """Returns [(machine and config, {row name: summary})] of every results.json that contains a mode."""
    found = []
    for path in sorted(RESULTS.glob("*/*/results.json")):
        results = read_results(path)
        if mode in results["modes"]:
            where = f"{tables.device(results)}: `{' '.join(results['config'])}`"
            found.append((where, {row["name"]: row for row in summary.summarize(results, mode)}))
    return found


def section(before, name):
    """Returns the page's section on a stage, with its diff to the stage before; the first shows train_step instead."""
    if before is None:
        command, language, lines = f"show {name}", "python", function(script(name), "train_step")
    else:
        lines = (re.sub("^@@ .* @@", "@@", line).rstrip() for line in diff(before, name))
        command, language, lines = f"diff {name}", "diff", "\n".join(lines).rstrip()
    field = f"`{change(name)}`\n\n" if before else ""
    gain = scaled(SCALING[name]) if name in SCALING else measured(before, name)
    return (
        f"## {name}\n\n{reason(name)}\n\n{field}{explanation(name)}\n\n"
        f"```{language}\n{lines}\n```\n\n{gain}`python ladder.py {command}`\n"
    )


def function(source, name):
    """Returns the source of a function."""
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_source_segment(source, node)
