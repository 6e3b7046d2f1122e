"""A stage as one program that imports nothing but torch and numpy: `ladder.py show NAME --standalone`.

A linker: all that the program calls in nanoladder/ stands in it, definition by definition and folded as it is. The
loop of lab/plain.py takes the place of the housekeeping, and all keys but its own have their defaults.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import libcst as cst
from libcst import matchers
from libcst.metadata import GlobalScope, MetadataWrapper, ScopeProvider

from lab.called import FOLDER, locate
from lab.fold import concerns, import_order, prune, settle
from lab.pages import values
from nanoladder.config import DEFAULTS
from nanoladder.parallel import CUTS

PLAIN, BATCHES = Path("lab/plain.py"), Path("nanoladder/data/batches.py")
REPLACED = {(BATCHES, name): (PLAIN, name) for name in ("TrainingBatches", "WORKERS")}
TITLE = '''\
"""A GPT and the loop that trains it, in one file: python PROGRAM.py TOKENS.bin [--n_layer=4 --max_steps=100 ...]

TOKENS.bin holds uint16 token ids, as data/*/prepare.py and nanoGPT write them. Prints the loss of each step.
"""

'''
OURS = ("nanoladder", "model", "train")


def standalone(name):
    """Returns the source of a stage's program. Raises BadInput if there is no such stage."""
    keys = {node.target.id for node in ast.walk(ast.parse(read(PLAIN))) if isinstance(node, ast.AnnAssign)}
    known = {key: repr(value) for key, value in DEFAULTS.items()} | values(name) | {"standalone": "True"}
    known = {key: value for key, value in known.items() if key not in keys}
    known["padded_vocab_size"] = f"vocab_size + -vocab_size % {known['pad_vocab_to']}"
    if known["shard"] == "'none'" and all(known[key] == "1" for key in CUTS):
        known["mesh"] = "'data'"
    program = "\n".join(prune(link(known)))
    program = program.replace("nanoladder::", "standalone::")  # its operators, beside those of an installed nanoladder
    return TITLE + re.sub(r"\n{4,}", "\n\n\n", program)


def read(path):
    return (FOLDER / path).read_text(encoding="utf-8")


def link(known):
    """Returns PLAIN and all that it calls, file by file in the order of their imports, which come first."""
    units, needed = {}, {}  # {path: Unit}, {path: {number of a statement}}

    def need(path, number):
        if number not in needed[path]:
            needed[path].add(number)
            for other, name in units[path].reads[number]:
                load(other)
                for number in units[other].numbers(name):
                    need(other, number)

    def load(path):
        if path not in units:
            source = read(path)
            units[path] = cached_unit(path, tuple((key, known[key]) for key in sorted(known) if concerns(key, source)))
            needed[path] = set()

    load(PLAIN)
    for number in range(1, len(units[PLAIN].body)):  # 0 is its docstring
        need(PLAIN, number)
    order = in_order(units, needed)
    taken = Counter(name for path in order for name in units[path].defined(needed[path]))
    renamed = frozenset(
        ((path, name), f"{path.stem}_{name}")
        for path in order
        for name in units[path].defined(needed[path])
        if taken[name] > 1
    )
    imports = {line for path in order for line in units[path].imports(needed[path])}
    lines = sorted(imports, key=import_order)
    parts = ["\n".join(line for line in lines if import_order(line)[0] == n) + "\n" for n in range(2)]
    parts += [units[path].linked(frozenset(needed[path]), renamed) for path in order]
    return [part for part in parts if part.strip()]


def in_order(units, needed):
    """The paths of files, each after those that it reads."""
    order, seen = [], set()

    def visit(path):
        if path not in seen:
            seen.add(path)
            for other in sorted({other for number in needed[path] for other, _ in units[path].reads[number]}):
                visit(other)
            order.append(path)

    visit(PLAIN)
    return order


class Unit:
    """A file, folded: its statements, and what each of them reads."""

    def __init__(self, path, known):
        self.path = path
        module = cst.parse_module(settle(read(path), dict(known)))
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        scopes = wrapper.resolve(ScopeProvider).values()
        scope = next(scope for scope in scopes if isinstance(scope, GlobalScope))
        self.references = {access.node: found.name for found in scope.assignments for access in found.references}
        self.body, self.imported, self.external = [], {}, {}
        for statement in self.module.body:
            if not self.add_import(statement):
                self.body.append(statement)
        self.names = [self.named(statement) for statement in self.body]
        self.reads = [self.targets(statement) for statement in self.body]

    def add_import(self, statement):
        """Notes an import, of ours {name: (module, name)} or another {name: line}. False if it is none."""
        node = ast.parse(self.module.code_for_node(statement)).body
        if not node or not isinstance(node := node[0], ast.Import | ast.ImportFrom):
            return isinstance(node, ast.Try)
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in OURS:
                self.imported[name] = node.module, alias.name
            else:
                one = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
                self.external[name] = ast.unparse(one)
        return True

    def target(self, name, attribute=None):
        """Returns (path, name) of what a global name, or an attribute of it, is defined as; None outside of us."""
        if name in self.external:
            return None
        if name not in self.imported:
            found = self.path, name
        else:
            module, original = self.imported[name]
            if is_module(module, original):
                if attribute is None:
                    return None
                module, original = f"{module}.{original}", attribute
            found = locate(module, original), original
        return REPLACED.get(found, found)

    def targets(self, statement):
        """The definitions of ours, (path, name), that a statement reads."""
        found = set()
        for node in matchers.findall(statement, matchers.Name() | matchers.Attribute(value=matchers.Name())):
            if isinstance(node, cst.Attribute):
                name, attribute = self.references.get(node.value), node.attr.value
            else:
                name, attribute = self.references.get(node), None
            if name and (target := self.target(name, attribute)) and not (attribute and name not in self.imported):
                found.add(target)
        return found

    def imports(self, numbers):
        """Lines that import what the statements read of others."""
        source = "".join(self.module.code_for_node(self.body[number]) for number in numbers)
        return {line for name, line in self.external.items() if re.search(rf"\b{name}\b", source)}

    def named(self, statement):
        """The names that a statement defines or, like a decorator, adds to."""
        node = ast.parse(self.module.code_for_node(statement)).body[0]
        match node:
            case ast.FunctionDef(name="_"):
                return {root(node.decorator_list[0])}
            case ast.FunctionDef() | ast.ClassDef():
                return {node.name}
            case ast.Assign():
                return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            case ast.Expr():
                return {root(node.value)}
        return set()

    def numbers(self, name):
        return [number for number, names in enumerate(self.names) if name in names]

    def defined(self, numbers):
        return {name for number in numbers for name in self.names[number]}

    @cache  # noqa: B019
    def linked(self, numbers, renamed):
        """Source of the statements, with the names that they have in the program. renamed: {(path, name), name}."""
        rename, brief = Rename(self, dict(renamed)), Brief()
        body = [self.body[number].visit(rename).visit(brief) for number in sorted(numbers)]
        if not body:
            return ""
        banner = f"\n# -- {self.path}\n\n" if self.path.parts[0] == "nanoladder" else ""
        return banner + "".join(self.module.code_for_node(node) for node in body)


cached_unit = cache(Unit)  # many stages share the values of the keys that concern a file


def is_module(module, name):
    path = Path(*module.split("."), name)
    return (FOLDER / path).is_dir() or (FOLDER / path.with_suffix(".py")).is_file()


def root(node):
    """The name at the beginning of an expression such as operator.register_fake(...)."""
    while not isinstance(node, ast.Name | ast.Constant):
        node = getattr(node, "func", None) or getattr(node, "value", None)
    return getattr(node, "id", "")


class Rename(cst.CSTTransformer):
    def __init__(self, unit, names):
        self.unit, self.new = unit, names
        self.depth = 0

    def leave_Attribute(self, original, updated):
        name = self.unit.references.get(original.value)
        if name not in self.unit.imported or not is_module(*self.unit.imported[name]):
            return updated
        target = self.unit.target(name, original.attr.value)
        return cst.Name(self.new.get(target, target[1]))

    def leave_Name(self, original, updated):
        name = self.unit.references.get(original)
        target = name and self.unit.target(name)
        return cst.Name(self.new[target]) if target in self.new else updated

    def visit_FunctionDef(self, node):
        self.depth += 1

    visit_ClassDef = visit_FunctionDef

    def leave_FunctionDef(self, original, updated):
        self.depth -= 1
        name = self.new.get((self.unit.path, original.name.value)) if not self.depth else None
        return updated.with_changes(name=cst.Name(name)) if name else updated

    leave_ClassDef = leave_FunctionDef

    def leave_AssignTarget(self, original, updated):
        if self.depth or not isinstance(original.target, cst.Name):
            return updated
        name = self.new.get((self.unit.path, original.target.value), original.target.value)
        return updated.with_changes(target=cst.Name(name))


class Brief(cst.CSTTransformer):
    """Leaves of each docstring the first paragraph."""

    def visit_SimpleString(self, node):
        return False

    def leave_SimpleString(self, original, updated):
        quotes, end = 3 * '"', "\n\n"
        if not (updated.value.startswith(quotes) and end in updated.value):
            return updated
        return updated.with_changes(value=updated.value.partition(end)[0] + quotes)
