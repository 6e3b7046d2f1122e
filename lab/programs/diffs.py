"""Programs of the stages, and diffs between them."""

import ast
import difflib
from collections.abc import Callable, Iterator
from functools import cache

from lab.programs import bundle
from lab.programs.fold import fold, merge

TITLE = """\
A GPT and the loop that trains it, in one program: python PROGRAM.py config/x.py --stage=NAME [--key=value ...]

The model comes first, then the loop, in sections: each uses only sections above it."""


@cache
def script(name: str) -> str:
    """Returns model.py and train.py as one program, with every ladder field folded to its value at a stage.

    Raises BadInput for an unknown stage.
    """
    modules = {module: bundle.read(f"{module}.py") for module in ("model", "train")}
    return fold(merge(modules, TITLE), bundle.values(name))


@cache
def definitions(a: str, b: str) -> list[tuple[str, str]]:
    """Returns [(path, source)] of our definitions that stage b's program calls and a's does not."""
    return bundle.definitions(script(b), script(a), bundle.values(b))


def matcher(old: list[str], new: list[str]) -> difflib.SequenceMatcher:
    """Returns the difflib.SequenceMatcher of two lists of lines."""
    return difflib.SequenceMatcher(None, old, new, autojunk=False)


def diff(a: str, b: str, program: Callable[[str], str] = script) -> Iterator[str]:
    """Yields the unified diff of two stages' programs; each hunk's header names the function of its first change.

    program: function of a stage; bundle.standalone also shows changes of what the programs call.
    """
    old, new = program(a).splitlines(), program(b).splitlines()
    for hunk in matcher(old, new).get_grouped_opcodes(n=2):
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
    around = [name for name, first, last in parts(ast.parse("\n".join(lines))) if first <= line <= last]
    return around[-1] if around else ""


def parts(tree: ast.AST, prefix: str = "") -> Iterator[list]:
    """Yields [name, first line, last line] of every class and function; a method is named Class.method."""
    for child in ast.iter_child_nodes(tree):
        inside = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inside = f"{prefix}{child.name}."
            yield [prefix + child.name, child.lineno, child.end_lineno]
        yield from parts(child, inside)
