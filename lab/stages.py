"""Reads the files of both ladders' stages: their fields, their reasons and the tree that they form."""

import ast

from nanoladder.config.stages import RECIPE_DIR, STAGES_DIR, parse, stage_below, stage_names, stage_path


def needs_several(name):
    """True for a stage that one process ignores: ddp, and what stands on it."""
    return "ddp" in stage_path(name)


def fields(name):
    """Returns the assignments of a stage's file, {field: expression}."""
    assignments = [node for node in parse(name).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in assignments}


def fields_up_to(name):
    """Returns {field: expression} of all fields of both ladders at a stage: its own, and the other's first."""
    firsts = [stage_names(folder)[0] for folder in (RECIPE_DIR, STAGES_DIR)]
    return {field: value for stage in [*firsts, *stage_path(name)] for field, value in fields(stage).items()}


def reason(name):
    """Returns the first line of a stage's docstring."""
    return ast.get_docstring(parse(name)).splitlines()[0]


def tree(folder=None):
    """Yields (lines, name) of a ladder's stages, in order. lines: the branch that leads there; none on the trunk."""
    names = stage_names(folder)
    above = {name: [other for other in names if stage_below(other) == name] for name in names}

    def walk(name, lines, ahead):
        yield lines, name
        for other in above[name]:
            if len(above[name]) == 1:
                yield from walk(other, ahead, ahead)
            else:
                last = other == above[name][-1]
                yield from walk(other, ahead + ("└ " if last else "├ "), ahead + ("  " if last else "│ "))

    return walk(names[0], "", "")
