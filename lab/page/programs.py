"""Programs of the ladder as HTML: each distinct line highlighted once, and the definitions that a stage newly calls."""

import difflib
import html

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

from lab import pages
from lab.link import standalone
from nanoladder.config.stages import stage_below

# CSS class of a token by Pygments' short name of its type; of others the first letter, if it is among COLORED.
CLASSES = {"sd": "c", "kc": "m", "ow": "k", "nf": "f", "fm": "f", "nc": "f", "nd": "f", "nb": "b", "bp": "b"}
COLORED = ("k", "s", "m", "f", "b", "c")


def highlighted(source):
    """Returns the lines of a source as HTML."""
    lines = [""]
    for token, text in PythonLexer(stripnl=False).get_tokens(source):
        short = STANDARD_TYPES[token]
        mark = CLASSES.get(short, short[:1])
        for n, part in enumerate(text.split("\n")):
            if n:
                lines.append("")
            code = html.escape(part, quote=False)
            lines[-1] += f"<span class={mark}>{code}</span>" if mark in COLORED and part.strip() else code
    return [f"<code{indentation(line)}>{line}</code>" for line in lines[:-1]]


def indentation(line):
    """The CSS class of a line's depth, which indents the rest of a wrapped line; empty for depth 0."""
    depth = (len(line) - len(line.lstrip(" "))) // 4
    return f" class=i{depth}" if depth else ""


def table():
    """Returns the distinct lines of all programs as HTML, by first use, and what climb.js needs to know of the stages.

    stages: [{name, on: the number of the stage that it stands on, lines: positions among the distinct ones, parts,
    alone: positions of the standalone program's lines among all `alone`}].
    changes: {a: {b: [first and last line in a, and in b, of each change]}} for the stages' numbers, a < b.
    """
    positions, alone, stages, names = {}, {}, [], pages.BOTH
    for name in names:
        below = stage_below(name)
        stages.append(
            {
                "name": name,
                "on": names.index(below) if below else None,
                "lines": [positions.setdefault(line, len(positions)) for line in highlighted(pages.script(name))],
                "parts": pages.parts(pages.script(name)),
                "alone": [alone.setdefault(line, len(alone)) for line in standalone(name).splitlines()],
            }
        )
    changes = {a: {b: changed(names[a], names[b]) for b in range(a + 1, len(names))} for a in range(len(names))}
    return list(positions), {"stages": stages, "changes": changes, "alone": list(alone)}


def changed(a, b):
    """Returns [first and last line in a, and in b] of each change between two stages' programs; numbers from 0."""
    old, new = (pages.script(stage).splitlines() for stage in (a, b))
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [lines for kind, *lines in opcodes if kind != "equal"]


def mechanism(stage):
    """Returns the definitions in nanoladder/ that a stage's program newly calls, as HTML; empty if there are none."""
    parts = []
    for path, source in pages.definitions(below, stage) if (below := stage_below(stage)) else ():
        lines = (f"<p class=line>{line}</p>" for line in highlighted(source))
        parts += [f"<p class=hunk>newly called, in {path}</p>", *lines]
    return "\n".join(parts)
