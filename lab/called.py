"""Definitions that a program calls in nanoladder/, folded as the program is: what stands behind a line of a diff."""

import ast
from functools import cache
from pathlib import Path

import libcst as cst
from libcst import matchers

from lab.fold import fold, reads

FOLDER = Path(__file__).parents[1]


def called(program):
    """Returns {file: names}: the definitions of nanoladder/ that the source of a program names, by where they stand."""
    packages, found = {}, set()
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "nanoladder":
            packages |= {alias.name: f"nanoladder.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("nanoladder."):
            found |= {(node.module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=package), attr=name) if package in packages:
                found.add((packages[package], name))
    files = {}
    for module, name in sorted(found):
        files.setdefault(locate(module, name), set()).add(name)
    return files


@cache
def locate(module, name):
    """Returns the path, relative to the root, of the file that defines a name, which a package may pass on."""
    path = Path(*module.split("."))
    path = path / "__init__.py" if (FOLDER / path).is_dir() else path.with_suffix(".py")
    for node in ast.parse((FOLDER / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return locate(node.module, name)
    return path


def definitions(path, names, program, values):
    """Returns the source of a file's definitions of these names, and of those in the file that they need.

    Folded by values, {field: expression}. A class keeps the methods that it or the program calls.
    """
    attributes = reads(ast.parse(program)).attributes
    roots = [*sorted(names), *(f"program.{name}" for name in sorted(attributes))]
    source = (FOLDER / path).read_text(encoding="utf-8")
    module = cst.parse_module(fold(f"{source}\n\n{', '.join(roots)}\n", values))
    body = [node for node in module.body[1:-1] if not imports(node)]
    first = body[0].with_changes(leading_lines=[line for line in body[0].leading_lines if line.comment])
    return module.with_changes(header=[], footer=[], body=[first, *body[1:]]).code.strip("\n")


def imports(node):
    """True for an import, and for one that is tried."""
    line = matchers.SimpleStatementLine(body=[matchers.Import() | matchers.ImportFrom()])
    return isinstance(node, cst.Try) or matchers.matches(node, line)
