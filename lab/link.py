"""Definitions of nanoladder/ that a program calls, folded as the program is: beside its diff, or linked into one file.

A linked program (`ladder.py show NAME --standalone`) imports nothing but torch and numpy: all that it calls stands in
it, definition by definition. The loop of lab/plain.py takes the place of the housekeeping, and all keys but its own
have their defaults.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from lab.fold import fold, import_order, prune, reads, settle, split
from nanoladder.config import DEFAULTS, Config, apply
from nanoladder.config.stages import fields_up_to, ladder_of, stage_files, stage_names
from nanoladder.parallel import CUTS

FOLDER = Path(__file__).parents[1]
OPTIONS = ("compile_scope", "compile_mode", "optimizer_in_backward")  # shown programs use their defaults
PLAIN, BATCHES = Path("lab/plain.py"), Path("nanoladder/data/batches.py")
REPLACED = {(BATCHES, name): (PLAIN, name) for name in ("TrainingBatches", "WORKERS")}
OURS = ("nanoladder", "model", "train")
TITLE = '''\
"""A GPT and the loop that trains it, in one file: python PROGRAM.py TOKENS.bin [--n_layer=4 --max_steps=100 ...]

TOKENS.bin holds uint16 token ids, as data/*/prepare.py and nanoGPT write them. Prints the loss of each step.
"""

'''


def values(name):
    """Returns {field: expression} of what a stage's program is folded by. Raises BadInput for an unknown stage."""
    known = {key: repr(DEFAULTS[key]) for key in OPTIONS} | fields_up_to(name)
    files = [*stage_files(stage_names()[0]), *stage_files(name, ladder_of(name))]
    config = Config(**apply(files, {}, DEFAULTS))
    return known | {"compiles_blocks": repr(config.compiles_blocks)}


def definitions(program, before, known):
    """Returns [(path, source)] of the definitions in nanoladder/ that a program calls and the one before does not.

    The source is folded by known, {field: expression}, and has what the definitions need of the same file. A class
    keeps the methods that it or the program calls.
    """
    files, shown = {}, []
    for path, name in called(program) - called(before):
        files.setdefault(path, []).append(name)
    roots = [f"program.{name}" for name in sorted(reads(ast.parse(program)).attributes)]
    for path in sorted(files):
        source = f"{read(path)}\n\n{', '.join([*sorted(files[path]), *roots])}\n"
        _, *statements, _ = split(fold(source, known))  # without docstring and roots
        kept = (text for text in statements if not isinstance(ast.parse(text).body[0], IMPORTS))
        shown.append((str(path), "".join(kept).strip("\n")))
    return shown


def called(program):
    """The definitions of nanoladder/, (path, name), that the source of a program reads."""
    unit = Unit(Path(), program)
    return {(path, name) for targets in unit.reads for path, name in targets if path != unit.path}


def standalone(name):
    """Returns the source of a stage as one program. Raises BadInput if there is no such stage."""
    keys = {node.target.id for node in ast.walk(ast.parse(read(PLAIN))) if isinstance(node, ast.AnnAssign)}
    known = {key: repr(value) for key, value in DEFAULTS.items()} | values(name) | {"standalone": "True"}
    known = {key: value for key, value in known.items() if key not in keys}
    known["padded_vocab_size"] = f"vocab_size + -vocab_size % {known['pad_vocab_to']}"
    if known["shard"] == "'none'" and all(known[key] == "1" for key in CUTS):
        known["mesh"] = "'data'"
    program = "\n".join(prune(link(known)))
    program = program.replace("nanoladder::", "standalone::")  # its operators, beside those of an installed nanoladder
    return TITLE + re.sub(r"\n{4,}", "\n\n\n", program)


def link(known):
    """Returns PLAIN and all that it calls, file by file in the order of their imports, which come first."""
    units, needed, order = {}, {}, {}  # {path: Unit}, {path: {number of a statement}}

    def need(path, number):
        if number not in needed[path]:
            needed[path].add(number)
            for other, name in units[path].reads[number]:
                load(other)
                for number in units[other].numbers(name):
                    need(other, number)

    def load(path):
        if path not in units:
            units[path], needed[path] = Unit(path, settle(read(path), known), REPLACED), set()

    def visit(path, seen):
        """Adds a file to the order, after those that it reads."""
        if path not in seen:
            seen.add(path)
            for other in sorted({other for number in needed[path] for other, _ in units[path].reads[number]}):
                visit(other, seen)
            order[path] = units[path].defined(needed[path])

    load(PLAIN)
    for number in range(1, len(units[PLAIN].statements)):  # 0 is its docstring
        need(PLAIN, number)
    visit(PLAIN, set())
    taken = Counter(name for names in order.values() for name in names)
    renamed = {
        (path, name): f"{path.stem}_{name}" for path, names in order.items() for name in names if taken[name] > 1
    }
    lines = sorted({line for path in order for line in units[path].imports(needed[path])}, key=import_order)
    parts = ["\n".join(line for line in lines if import_order(line)[0] == n) + "\n" for n in range(2)]
    parts += [units[path].linked(needed[path], renamed) for path in order]
    return [part for part in parts if part.strip()]


IMPORTS = ast.Import | ast.ImportFrom | ast.Try  # or one that is tried
DOCSTRING = r'(?s:""".*?""")'
TEXT = rf'{DOCSTRING}|"[^"\n]*"|#.*'
NAME = r"(?<![\w.])(\w+)\b(?!=)(?:\.(\w+))?"  # and an attribute; not that of an argument


class Unit:
    """A folded file: its statements as text, the names that each defines, and the definitions of ours that it reads.

    Told apart by name: no local variable may have that of a module of ours that its file imports.
    """

    def __init__(self, path, source, replaced=()):
        self.path, self.replaced = path, dict(replaced)
        self.modules, self.imported, self.external = {}, {}, {}  # by name: module, (module, name), line
        self.statements, self.names, self.reads = [], [], []
        parsed = [(text, ast.parse(text).body[0]) for text in split(source)]
        for _, node in parsed:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.add_import(node)
        for text, node in parsed:
            if not isinstance(node, IMPORTS):
                self.statements.append(text)
                self.names.append(names(node))
                self.reads.append(set(self.targets(node)))

    def add_import(self, node):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.Import):
                self.external[name] = ast.unparse(ast.Import([alias]))
            elif node.module.partition(".")[0] not in OURS:
                self.external[name] = ast.unparse(ast.ImportFrom(node.module, [alias], 0))
            elif is_module(module := f"{node.module}.{alias.name}"):
                self.modules[name] = module
            else:
                self.imported[name] = node.module, alias.name

    def target(self, name, module=None):
        """Returns (path, name) of what a name in this file, or in a module, is defined as."""
        if not module:
            module, name = self.imported.get(name, (None, name))
        target = (locate(module, name) if module else self.path), name
        return self.replaced.get(target, target)

    def targets(self, tree):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self.modules:
                    yield self.target(attribute, self.modules[name])
                case ast.Name(id=name) if name not in self.modules and name not in self.external:
                    yield self.target(name)

    def numbers(self, name):
        return [number for number, names in enumerate(self.names) if name in names]

    def defined(self, numbers):
        return {name for number in numbers for name in self.names[number]}

    def imports(self, numbers):
        """Lines that import what the statements read of others."""
        source = "".join(self.statements[number] for number in numbers)
        return {line for name, line in self.external.items() if re.search(rf"\b{name}\b", source)}

    def linked(self, numbers, renamed):
        """Source of the statements, with the names that they have in the program: {(path, name): name}."""

        def rename(match):
            name, attribute = match[1], match[2]
            if attribute and name in self.modules:
                target = self.target(attribute, self.modules[name])
                return renamed.get(target, target[1])
            return match[0].replace(name, renamed.get(self.target(name), name), 1) if name else match[0]

        source = "".join(self.statements[number] for number in sorted(numbers))
        source = re.sub(rf"{TEXT}|{NAME}", rename, source)
        source = re.sub(DOCSTRING, first_paragraph, source)
        banner = f"\n# -- {self.path}\n\n" if source and self.path.parts[0] == "nanoladder" else ""
        return banner + source


def first_paragraph(docstring):
    paragraph, more, _ = docstring[0].partition("\n\n")
    return f'{paragraph}"""' if more else paragraph


def names(node):
    """The names that a statement defines or, like a decorator, adds to."""
    match node:
        case ast.FunctionDef(name="_"):
            return {first_name(node.decorator_list[0])}
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        case ast.Expr():
            return {first_name(node)}
    return set()


def first_name(node):
    """The name at the beginning of an expression such as operator.register_fake(...)."""
    return re.match(r"\w*", ast.unparse(node))[0]


def read(path):
    return (FOLDER / path).read_text(encoding="utf-8")


def is_module(name):
    path = FOLDER.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def locate(module, name):
    """Returns the path, relative to the root, of the file that defines a name, which a package may pass on."""
    path = Path(*module.split("."))
    path = path / "__init__.py" if (FOLDER / path).is_dir() else path.with_suffix(".py")
    for node in ast.parse(read(path)).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return locate(node.module, name)
    return path
