"""Structure of the code: imports point downwards and form no cycle; functions are short.

lab → scripts → nanoladder → model.py → operators.
"""

import ast
import graphlib
import re
import subprocess
import tomllib

import pytest
from conftest import ROOT

# Rooms and files from top to bottom. An import leads to a lower line, or stays inside its room.
LAYERS = [
    ("profile", "ladder", "convert"),  # the doors; convert writes programs that the lab folds
    ("lab",),
    ("train", "sample", "evaluate", "data"),  # the scripts; data: each dataset's prepare.py
    ("nanoladder.run",),
    ("nanoladder.checkpoint", "nanoladder.evaluation", "nanoladder.infer"),
    ("nanoladder.data", "nanoladder.optim"),
    ("nanoladder.prepare",),
    ("nanoladder.command",),
    ("nanoladder.entry",),
    ("nanoladder.parallel",),
    ("nanoladder.machine", "nanoladder.arithmetic"),
    ("nanoladder.config",),
    ("nanoladder.tokenizer",),
    ("nanoladder.errors", "nanoladder.files", "nanoladder.private", "config"),
    ("model",),
    ("operators",),  # on tensors and numbers only; with torch, all that model.py is made of
]
PRIVATE = "operators.private", "nanoladder.private"
HEIGHT = {room: -layer for layer, rooms in enumerate(LAYERS) for room in rooms}
# The files in the root, and no others.
SCRIPTS = ["convert.py", "evaluate.py", "ladder.py", "model.py", "profile.py", "sample.py", "train.py"]

FOLDERS = ("operators", "nanoladder", "lab", "config", "data")
PATHS = [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in sorted(ROOT.glob(f"{name}/**/*.py")))]
TREES = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in PATHS}
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}


def nodes():
    """Every syntax node of the code, except in tests, as (module, "file:line", node)."""
    for module, path in MODULES.items():
        for node in ast.walk(TREES[path]):
            yield module, f"{path}:{getattr(node, 'lineno', 0)}", node


def imports():
    """Every import of one of our modules by another, also inside functions, as (source, target, "file:line")."""
    for source, place, node in nodes():
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{place}: expected the full name, not a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case _:
                continue
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name:
                yield source, name, place


def room(module):
    """Name of a module's room in LAYERS: nanoladder.run.report -> nanoladder.run, lab.measure.tables -> lab."""
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "nanoladder" else parts[:1])


def test_every_import_points_to_a_lower_layer():
    for source, target, place in imports():
        above, below = room(source), room(target)
        assert above == below or HEIGHT[above] > HEIGHT[below], f"{place}: {source} imports {target}, not below it"


def test_no_imports_form_a_cycle():
    graph = {}
    for source, target, _ in imports():
        graph.setdefault(source, set()).add(target)
    graphlib.TopologicalSorter(graph).prepare()  # its error names a cycle


def test_every_room_says_what_lives_in_it():
    for folder in {path.parent for path in TREES if path.parts[0] in ("operators", "nanoladder", "lab")}:
        assert ast.get_docstring(TREES[folder / "__init__.py"]), folder


@pytest.mark.slow
def test_the_root_has_the_promised_scripts_and_no_others():
    tracked = []
    if (ROOT / ".git").exists():  # scripts that a user keeps here do not count
        command = ["git", "ls-files", ":(glob)*.py"]
        tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert (tracked or sorted(path.name for path in ROOT.glob("*.py"))) == SCRIPTS


def test_the_sections_of_train_py_are_numbered():
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    assert re.findall(r"^# -- (\d)\. \S", source, re.MULTILINE) == list("123456")


def test_uv_installs_the_versions_of_make_train():
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    versions = {package["name"]: package.get("version") for package in locked}
    pins = [line.split("==") for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").split()]
    assert pins and all(versions[name.lower()] == version for name, version in pins)


def test_the_declared_packages_are_those_of_make_train():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["tracking"], *extras["low-memory"]]
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").lower().split()
    assert {name.partition(">")[0] for name in declared} == {name.partition("=")[0] for name in pins}


def test_private_names_of_torch_are_confined_to_two_files():
    """Names that begin with an underscore, also as strings; of operators and of the rest. lab may have its own."""
    for module, place, node in nodes():
        if room(module) in ("lab", "data", "config") or module in PRIVATE:
            continue
        match node:
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Attribute() | ast.Import():
                names = [ast.unparse(node).removeprefix("import ")]
            case ast.Call(func=ast.Name("getattr" | "attrgetter" | "hasattr")):
                names = [f"torch.{string.value}" for string in ast.walk(node) if is_text(string)]
            case ast.Constant(str()) if re.fullmatch(r"torch[\w.]+", node.value):
                names = [node.value]
            case _:
                names = []
        assert not any(re.match(r"(torch|aten|nn|F|dist)\b.*\._[a-z]", name) for name in names), f"{place}: {names}"


def test_patches_are_confined_to_one_file():
    froms = ((module, node) for module, _, node in nodes() if isinstance(node, ast.ImportFrom))
    assert {module for module, node in froms if node.module == "unittest.mock"} == {"lab.predict.patches"}


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def find(module, name):
    """Returns (path, node) of the function or class that a module has under a name; None if it is something else."""
    for node in TREES[MODULES[module]].body:
        if getattr(node, "name", None) == name:
            return MODULES[module], node
        if isinstance(node, ast.ImportFrom) and node.module in MODULES and name in {each.name for each in node.names}:
            return find(node.module, name)
    return None


def doors():
    """Every function that another room calls, as ("file:line name", node).

    These are the functions and classes that a room's __init__ offers, that another room imports, or that it reads from
    a module; of a class, its constructor and the methods whose names are read in a file that imports from the room.
    """
    read, users, offered = {}, {}, set()  # {file: names of attributes in it}, {room: files that import from it}
    for path in MODULES.values():
        modules, uses = {}, []  # {name: module}, [(module, name in it)]
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Attribute):
                read.setdefault(path, set()).add(node.attr)
                uses.append((modules.get(ast.unparse(node.value)), node.attr))
            for alias in node.names if isinstance(node, ast.ImportFrom) else []:
                if (module := f"{node.module}.{alias.name}") in MODULES:
                    modules[alias.asname or alias.name] = module
                uses.append((node.module, alias.name))
        for owner, node in {find(module, name) for module, name in uses if module in MODULES} - {None}:
            if owner.parent != path.parent:
                users.setdefault(owner.parent, set()).add(path)
            if owner.parent != path.parent or path.name == "__init__.py":
                offered.add((owner, node))
    for path, node in offered:
        names = {"__init__"}.union(*(read.get(user, ()) for user in users.get(path.parent, ())))
        functions = [part for part in getattr(node, "body", []) if isinstance(part, ast.FunctionDef)]
        for function in [node] if isinstance(node, ast.FunctionDef) else functions:
            if function is node or function.name in names:
                yield f"{path}:{function.lineno} {function.name}", function


def test_what_rooms_call_of_each_other_is_annotated():
    for place, function in doors():
        if place.startswith("model.py") and function.name == "__init__":
            continue  # takes a config, whose type stands above it
        parameters = [each for each in ast.walk(function.args) if isinstance(each, ast.arg)]
        bare = [each.arg for each in parameters if not each.annotation and each.arg != "self"]
        assert function.returns and not bare, f"{place}: expected types of {bare} and of what it returns"
