"""Folding: values put in, constants computed, branches taken or dropped, and what is then unused gone."""

from textwrap import dedent

import pytest

from lab.fold import fold, merge

VALUES = {"on": "True", "off": "False", "zero": "0", "two": "2", "kind": "'b'", "half": "batch_size // 2"}


def folded(source):
    """A snippet after folding, in a function that is used."""
    body = dedent(source).strip().replace("\n", "\n    ")
    result = fold(f"def f(config):\n    {body}\n\n\nf()\n", VALUES)
    return dedent(result.partition("\n")[2].partition("\n\n\nf(")[0])


@pytest.mark.parametrize(
    "expression, result",
    [
        ("config.two", "2"),
        ("model.config.kind", '"b"'),
        ("config.other", "config.other"),
        ("x.on", "x.on"),
        ("config.on and x", "x"),
        ("config.off and x", "False"),
        ("x and config.on", "x"),
        ("x or config.on", "True"),
        ("config.zero or x", "x"),
        ("config.half or x", "config.batch_size // 2"),
        ("x or 'a default'", "x or 'a default'"),
        ("not config.zero", "True"),
        ("1 if config.on else 2", "1"),
        ("1 if config.half else 2", "1"),
        ("1 if x else 2", "1 if x else 2"),
        ("config.two > 1 and x > y", "x > y"),
        ("config.kind in ('a', 'b')", "True"),
        ("config.kind == 'a' or x", "x"),
        ("x > config.two", "x > 2"),
        ("2 * 512", "2 * 512"),
        ("f(config.half)", "f(config.batch_size // 2)"),
        ("10 // config.half", "10 // (config.batch_size // 2)"),
        ("int('every:2'.removeprefix('every:'))", "int('every:2'.removeprefix('every:'))"),
        ("int(config.kind.replace('b', '3'))", "3"),
    ],
)
def test_expressions(expression, result):
    assert folded(f"return {expression}") == f"return {result}"


@pytest.mark.parametrize("condition, taken", [("config.on", "a()"), ("config.off", "b()"), ("config.half", "a()")])
def test_a_known_condition_leaves_one_branch(condition, taken):
    assert folded(f"if {condition}:\n    a()\nelse:\n    b()") == taken
    assert folded(f"x()\nif {condition}:\n    a()\ny()") == "x()\n" + ("a()\n" if taken == "a()" else "") + "y()"


@pytest.mark.parametrize(
    "conditions, result",
    [
        (("config.off", "x"), "if x:\n    b()\nelse:\n    c()"),
        (("x", "config.on"), "if x:\n    a()\nelse:\n    b()"),
        (("x", "config.off"), "if x:\n    a()\nelse:\n    c()"),
        (("config.off", "config.on"), "b()"),
        (("config.off", "config.off"), "c()"),
        (("config.on", "x"), "a()"),
    ],
)
def test_a_chain_of_conditions(conditions, result):
    assert folded("if {}:\n    a()\nelif {}:\n    b()\nelse:\n    c()".format(*conditions)) == result


def test_comments_stay_with_what_they_are_about():
    source = """
    # before
    if config.on:  # why
        # first
        a()  # beside
    else:  # why not
        # gone
        b()
    """
    assert folded(source) == "# before\n# why\n# first\na()  # beside"


def test_nothing_follows_a_return():
    assert folded("if config.on:\n    return 1\nreturn 2") == "return 1"
    assert folded("if config.off:\n    return 1\nreturn 2") == "return 2"
    unknown = "returned = 1\nif x:\n    return 1\nreturn returned"
    assert folded(unknown) == unknown


def test_a_loop_over_one_item_is_its_body():
    assert folded("for a, b in cut(x) if config.off else [x]:\n    g(a)\n    g(b)") == "a, b = x\ng(a)\ng(b)"
    parts = "parts = cut(x) if config.off else [x]\nif config.{}:\n    parts = last(parts)\nfor a in parts:\n    g(a)"
    assert folded(parts.format("off")) == "a = x\ng(a)"
    assert folded(parts.format("on")) == "parts = [x]\nparts = last(parts)\nfor a in parts:\n    g(a)"
    assert folded("for a in [x, y]:\n    g(a)") == "for a in [x, y]:\n    g(a)"


def test_a_context_that_does_nothing_is_gone():
    assert folded("with c() if config.off else nullcontext():\n    f()") == "f()"
    assert folded("with c() if config.on else nullcontext():\n    f()") == "with c():\n    f()"
    assert folded("with d(), c() if config.off else nullcontext():\n    f()") == "with d():\n    f()"


BEFORE = """
import os
from a import b, c, d
from e import f as g

# A constant.
SIZE = b(3)


class Used(c):
    def __init__(self, config):
        self.config = config
        self.size = config.n

    def forward(self):
        return self.size

    def helper(self):
        return self.config.off


class Unused(c):
    pass


def helper(config):
    return g(SIZE, os)


def main(x, config, y):
    last = 0
    if config.off:
        last = helper(config)
        print(last)
    return Used(x)


main(1, make(), y=2)
"""
AFTER = """
from a import c


class Used(c):
    def __init__(self, config):
        self.size = config.n

    def forward(self):
        return self.size


def main(x):
    return Used(x)


main(1)
"""


def test_what_nothing_reads_is_dropped():
    assert fold(BEFORE, VALUES) == AFTER


def test_merged_modules_are_one_program():
    library = '"""A library."""\n\nimport os\n\nfrom a import b\n\nK = 1  # one\n'
    imports = "import math\nimport os\n\nimport torch\n\nimport c\nfrom library import K\n"
    program = f'"""A program."""\n\n{imports}\n\nmain(K)\n'
    assert merge({"library": library, "program": program}) == (
        '"""A program.\n\nA library.\n"""\n\nimport math\nimport os\n\nimport torch\n\n'
        "import c\nfrom a import b\n\nK = 1  # one\n\n\nmain(K)\n"
    )
