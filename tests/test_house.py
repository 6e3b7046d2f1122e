"""Structure of the code: imports point downwards and form no cycle; train.py and every function are short."""

import ast
import graphlib
import re
import subprocess
from dataclasses import dataclass
from itertools import pairwise

from conftest import ROOT

# Rooms and files from top to bottom. An import leads to a lower line, or stays inside its room.
LAYERS = [
    ("profile", "ladder"),  # the doors
    ("lab",),
    ("train", "sample", "evaluate", "convert", "data"),  # the scripts; data: each dataset's prepare.py
    ("nanoladder.run",),
    ("nanoladder.checkpoint", "nanoladder.evaluation", "nanoladder.infer"),
    ("nanoladder.data", "nanoladder.optim"),
    ("nanoladder.entry",),
    ("nanoladder.parallel",),
    ("nanoladder.machine",),
    ("nanoladder.config",),
    ("model", "nanoladder.errors", "nanoladder.files", "nanoladder", "config"),
    ("nanoladder.kernels",),
    ("nanoladder.private",),
]
HEIGHT = {room: -layer for layer, rooms in enumerate(LAYERS) for room in rooms}
# The files in the root, and no others.
SCRIPTS = ["convert.py", "evaluate.py", "ladder.py", "model.py", "profile.py", "sample.py", "train.py"]

# The most lines of Python of each room: what is added replaces something, and whoever cuts lowers the number.
BUDGETS = {
    "*.py": 845,
    "nanoladder/config/*.py": 545,
    "nanoladder/run/*.py": 1177,
    "nanoladder/data/*.py": 1500,
    "nanoladder/checkpoint/*.py": 890,
    "nanoladder/parallel/*.py": 1021,
    "nanoladder/machine/*.py nanoladder/kernels/*.py": 885,
    "nanoladder/optim/*.py nanoladder/infer/*.py nanoladder/evaluation/*.py": 1010,
    "lab/**/*.py": 7144,
    "lab/page/*.js lab/page/*.css lab/page/*.html": 900,
    "tests/**/*.py": 14054,
}


@dataclass(frozen=True)
class Import:
    """An import statement in a module (source) of another one of ours (target)."""

    source: str
    target: str
    place: str  # file:line
    relative: bool

    def __str__(self):
        return f"{self.place}: {self.source} imports {self.target}"


def python_files(root):
    """Every .py file of the house, tests excepted."""
    folders = [
        path for name in ("nanoladder", "lab", "config", "data") for path in sorted(root.glob(f"{name}/**/*.py"))
    ]
    return sorted(root.glob("*.py")) + folders


def module_name(path):
    """nanoladder/run/report.py -> nanoladder.run.report; of an __init__.py its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """nanoladder.run.report -> nanoladder.run, lab.tables -> lab: the name that stands in LAYERS."""
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "nanoladder" else parts[:1])


def targets(node, modules):
    """The modules of ours that a syntax node imports; of `from room import name` the file `name`, if there is one."""
    match node:
        case ast.Import(names=names):
            imported = [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names):
            imported = [".".join(filter(None, [module, alias.name])) for alias in names]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
            imported = [name]
        case _:
            imported = []
    for name in imported:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name:
            yield name


def all_imports(root):
    """Every import of one of our modules by another, those inside functions too."""
    paths = {module_name(path.relative_to(root)): path for path in python_files(root)}
    for source, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            for target in dict.fromkeys(["." * node.level] if relative else targets(node, paths)):
                yield Import(source, target, f"{path.relative_to(root)}:{node.lineno}", relative)


def against_the_rule(root):
    """Imports that lead upwards or aside, are relative, or begin or end in a room that has no place in LAYERS."""
    for line in all_imports(root):
        rooms = room(line.source), room(line.target)
        if line.relative:
            yield f"{line.place}: {line.source} has a relative import; expected the full name"
        elif not all(name in HEIGHT for name in rooms):
            yield f"{line}, one of which has no place in LAYERS"
        elif rooms[0] != rooms[1] and HEIGHT[rooms[0]] <= HEIGHT[rooms[1]]:
            yield f"{line}, which is not below it"


def cycles(root):
    """Import cycles between modules, each as its lines."""
    lines = {(line.source, line.target): line for line in all_imports(root)}
    while True:
        graph = {}
        for source, target in lines:
            graph.setdefault(source, []).append(target)
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return
        except graphlib.CycleError as error:
            loop = error.args[1][::-1]  # each module imports the next
            yield " → ".join(str(lines[pair]) for pair in pairwise(loop))
            del lines[loop[0], loop[1]]  # the next round finds another cycle


def rooms_without_docstring(root):
    """Folders of .py files in nanoladder/ and lab/ without an __init__.py that says what lives there."""
    for folder in sorted({path.parent for name in ("nanoladder", "lab") for path in root.glob(f"{name}/**/*.py")}):
        path = folder / "__init__.py"
        if not path.exists() or not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(root)}: expected a docstring that says what lives in the room and what does not"


def test_every_import_follows_the_rule():
    assert list(all_imports(ROOT))
    violations = list(against_the_rule(ROOT))
    assert not violations, "\n".join(violations)


def test_no_imports_form_a_cycle():
    found = list(cycles(ROOT))
    assert not found, "\n".join(found)


def test_no_room_outgrows_its_budget():
    for patterns, most in BUDGETS.items():
        paths = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
        n_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        assert n_lines <= most, f"{patterns}: {n_lines} lines, expected at most {most}"


def test_every_room_says_what_lives_in_it():
    missing = list(rooms_without_docstring(ROOT))
    assert not missing, "\n".join(missing)


def test_the_root_has_the_promised_scripts_and_no_others():
    tracked = []
    if (ROOT / ".git").exists():  # scripts that a user keeps here do not count
        command = ["git", "ls-files", ":(glob)*.py"]
        tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert (tracked or sorted(path.name for path in ROOT.glob("*.py"))) == SCRIPTS


# -- train.py


# -- train.py and every function: short enough to read


def ladder_fields():
    """Fields of the ladder: all that the first stage turns off."""
    statements = ast.parse((ROOT / "config" / "stages" / "00_naive.py").read_text(encoding="utf-8")).body
    return {statement.targets[0].id for statement in statements if isinstance(statement, ast.Assign)}


def decisions(node):
    """Expressions on which a node branches: of if, elif, while, a conditional expression, a comprehension's ifs."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def conditions(source, fields):
    """["line: condition"] for every condition on config.FIELD for one of the fields."""
    found = []
    for test in (test for node in ast.walk(ast.parse(source)) for test in decisions(node)):
        asked = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute) and is_config(node.value)}
        if asked & fields:
            found.append(test)
    return [f"{test.lineno}: {ast.unparse(test)}" for test in sorted(found, key=lambda test: test.lineno)]


def is_config(node):
    """True for `config` and `self.config`."""
    return getattr(node, "attr", getattr(node, "id", None)) == "config"


def long_functions(root, longest):
    """Functions of more lines than that, as "file:line: name has N lines"."""
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                n_lines = node.end_lineno - node.lineno + 1
                if n_lines > longest:
                    yield f"{path.relative_to(root)}:{node.lineno}: {node.name} has {n_lines} lines"


def test_train_py_is_short_and_in_the_order_in_which_it_runs():
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    assert re.findall(r"^# -- (\d)\. \S", source, re.MULTILINE) == list("123456")
    assert len(source.splitlines()) < 180


def test_train_py_has_at_most_12_conditions_on_fields_of_the_ladder():
    found = conditions((ROOT / "train.py").read_text(encoding="utf-8"), ladder_fields())
    assert len(found) <= 12, "\n".join(found)


def test_no_function_is_longer_than_60_lines():
    found = list(long_functions(ROOT, 60))
    assert not found, "\n".join(found)


def private_names(root):
    """Names of torch that begin with an underscore, except in nanoladder/private.py, as "file:line: name"."""
    for path in [*sorted(root.glob("nanoladder/**/*.py")), *sorted(root.glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom(module=str(module)):
                    names = [f"{module}.{alias.name}" for alias in node.names]
                case ast.Attribute() | ast.Import():
                    names = [ast.unparse(node).removeprefix("import ")]
                case _:
                    names = []
            if path.name != "private.py":
                yield from (f"{path}:{node.lineno}: {name}" for name in names if re.match(r"torch\b.*\._[a-z]", name))


def test_private_names_of_torch_stand_in_one_file():
    assert list(private_names(ROOT)) == []
