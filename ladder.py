"""The ladder's stages in order: python ladder.py [list]"""

import ast

from config import BadInput, run, stage_files, stage_names


def main(argv):
    if argv not in ([], ["list"]):
        raise BadInput(f"ladder.py {' '.join(argv)}: expected `python ladder.py list`")
    rows = [(name, change(name), reason(name)) for name in stage_names()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, text, why in rows:
        print(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {why}")


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


if __name__ == "__main__":
    run(main)
