"""Programs of the ladder as HTML: each distinct line highlighted once, and the definitions that a stage newly calls."""

import ast
import html
import itertools
from functools import cache

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

from lab.programs import diffs
from lab.programs.bundle import standalone
from lab.programs.edits import split
from lab.programs.stages import BOTH
from nanoladder.config.stages import stage_below

# CSS class of a token by Pygments' short name of its type; of others the first letter, if it is among COLORED.
CLASSES = {"sd": "c", "kc": "m", "ow": "k", "nf": "f", "fm": "f", "nc": "f", "nd": "f", "nb": "b", "bp": "b"}
COLORED = ("k", "s", "m", "f", "b", "c")


def highlight(source):
    """Returns the lines of a source as HTML."""
    return list(itertools.chain(*map(highlight_statement, split(source))))


@cache  # stages have most statements in common
def highlight_statement(source):
    """Returns the lines of a top-level statement as HTML."""
    lines = [""]
    for token, text in PythonLexer(stripnl=False).get_tokens(source):
        short = STANDARD_TYPES[token]
        mark = CLASSES.get(short, short[:1])
        for n, part in enumerate(text.split("\n")):
            if n:
                lines.append("")
            code = html.escape(part, quote=False)
            lines[-1] += f"<span class={mark}>{code}</span>" if mark in COLORED and part.strip() else code
    depths = ((len(line) - len(line.lstrip(" "))) // 4 for line in lines)  # indent the rest of a wrapped line
    return [f"<code class=i{depth}>{line}</code>" for depth, line in zip(depths, lines[:-1], strict=False)]


@cache  # also for the test that compares its lines with the programs
def table():
    """Returns the distinct lines of all programs as HTML, by first use, and what climb.js needs to know of the stages.

    stages: [{name, on: the number of the stage that it stands on, lines: positions among the distinct ones, parts,
    alone: positions of the standalone program's lines among all `alone`}].
    changes: {a: {b: [lines that are equal, then removed, then added, again and again]}} for the stages' numbers, a < b.
    """
    positions, alone, stages, names = {}, {}, [], BOTH
    for name in names:
        below = stage_below(name)
        stages.append(
            {
                "name": name,
                "on": names.index(below) if below else None,
                "lines": [positions.setdefault(line, len(positions)) for line in highlight(diffs.script(name))],
                "parts": list(diffs.parts(ast.parse(diffs.script(name)))),
                "alone": [alone.setdefault(line, len(alone)) for line in standalone(name).splitlines()],
            }
        )
    changes = {n: {} for n in range(len(names))}
    for (n, a), (m, b) in itertools.combinations(enumerate(names), 2):
        matcher = diffs.matcher(diffs.script(a).splitlines(), diffs.script(b).splitlines())
        changes[n][m], end = [], 0
        for kind, i, i2, j, j2 in matcher.get_opcodes():
            if kind != "equal":
                changes[n][m] += [i - end, i2 - i, j2 - j]
                end = i2
    return list(positions), {"stages": stages, "changes": changes, "alone": list(alone)}


def mechanism(stage):
    """Returns the definitions in nanoladder/ that a stage's program newly calls, as HTML, folded.

    If the program is the same, returns the lines that change in the definitions that it calls. Empty if there are none.
    """
    blocks = []
    for path, source in stage.definitions if stage.below else []:
        lines = [f"<p class=line>{line}</p>" for line in highlight(source)]
        summary = f"<summary class=called>newly called, in {path}: {len(lines)} lines</summary>"
        blocks += [f"<details>{summary}", *lines, "</details>"]
    if stage.same_program:
        lines = (f"<p class=line><code>{html.escape(line, quote=False)}</code></p>" for line in stage.diff.splitlines())
        blocks += ["<p class=hunk>changed in the definitions that it calls</p>", *lines]
    return "\n".join(blocks)
