"""Our definitions that a program calls, folded as the program is: beside its diff, or linked into one file.

A linked program (`ladder.py show NAME --standalone`) imports nothing but torch and numpy: it contains all definitions
that it calls. standalone_loop.py takes the place of the housekeeping, and all keys but its own have their defaults.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from lab.programs.edits import split
from lab.programs.fold import fold, prune, reads_by_scope, sections, settle
from nanoladder.arithmetic import CUTS
from nanoladder.config import DEFAULTS, Config, apply
from nanoladder.config.stages import fields_up_to, ladder_of, stage_files, stage_names

FOLDER = Path(__file__).parents[2]
OPTIONS = ("optimizer_in_backward",)  # shown programs use their defaults
LOOP, BATCHES = Path("lab/programs/standalone_loop.py"), Path("nanoladder/data/batches.py")
REPLACED = tuple(((BATCHES, name), (LOOP, name)) for name in ("TrainingBatches", "ValidationBatches", "WORKERS"))
OURS = ("operators", "nanoladder", "model", "train")
TITLE = '''\
"""A GPT and the loop that trains it, in one file: python PROGRAM.py FOLDER [--n_layer=4 --max_steps=100 ...]

It reads token ids, FOLDER/train.bin and val.bin, as data/*/prepare.py or nanoGPT writes them. It prints losses,
{ending}
Left out, and in train.py: resuming, checkpoints during training, metrics and curves, checks of the data and the keys.
"""

'''
WHOLE = "saves the weights to model.pt, and prints a sample."
DIVIDED = "but saves no weights and prints no sample: no process could do so alone."


def values(name):
    """Returns {field: expression}, by which a stage's program is folded. Raises BadInput for an unknown stage."""
    known = {key: repr(DEFAULTS[key]) for key in OPTIONS} | fields_up_to(name)
    files = [*stage_files(stage_names()[0]), *stage_files(name, ladder_of(name))]
    config = Config(**apply(files, {}, DEFAULTS))
    return known | {
        name: repr(getattr(config, name)) for name in ("compiles_blocks", "divides_weights", "has_rates", "scales_lr")
    }


def definitions(program, before, known):
    """Returns [(path, source)] of our definitions that a program calls and its predecessor does not.

    The source is folded by known, {field: expression}, and has what the definitions need of the same file. A class
    keeps the methods that it or the program calls.
    """
    files, shown = {}, []
    for path, name in called(program) - called(before):
        files.setdefault(path, []).append(name)
    tree = ast.parse(program)
    roots = [f"program.{name}" for name in sorted(reads_by_scope(tree)[1][tree])]
    for path in sorted(files):
        source = f"{read(path)}\n\n{', '.join([*sorted(files[path]), *roots])}\n"
        _, *statements, _ = split(fold(source, known))  # without docstring and roots
        kept = (text for text in statements if not isinstance(parsed(text), IMPORTS))
        shown.append((str(path), "".join(kept).strip("\n")))
    return shown


def called(program):
    """Returns our definitions, (path, name), that a program's source reads."""
    _, statements = load(Path(), program)
    return {(path, name) for _, text in statements for path, name in read_in(text) if path != Path()}


def standalone(name: str) -> str:
    """Returns the source of a stage as one program. Raises BadInput if there is no such stage."""
    keys = {node.target.id for node in ast.walk(ast.parse(read(LOOP))) if isinstance(node, ast.AnnAssign)}
    known = {key: repr(value) for key, value in DEFAULTS.items()} | values(name) | {"standalone": "True"}
    known = {key: value for key, value in known.items() if key not in keys}
    known["padded_vocab_size"] = f"vocab_size + -vocab_size % {known['pad_vocab_to']}"
    whole = known["shard"] == "'none'" and all(known[key] == "1" for key in CUTS)  # the model, in each process
    if whole:
        known["mesh"] = "'data'"
    program = prune(collect(known))
    program = program.replace("nanoladder::", "standalone::")  # its operators, beside those of an installed nanoladder
    return TITLE.format(ending=WHOLE if whole else DIVIDED) + re.sub(r"\n{4,}", "\n\n\n", program)


def collect(known):
    """Returns LOOP and everything that it calls, file by file in import order, after all import lines."""
    files, needed, order = {}, {}, {}  # {path: (import lines, statements)}, {path: {number: statement}}, {path: source}

    def need(path, name=None):
        """Adds the statements that define a name, or all but the docstring, and all that they read."""
        if path not in files:
            files[path], needed[path] = load(path, settle(read(path), known), REPLACED), {}
        for number, (names, text) in enumerate(files[path][1]):
            if number not in needed[path] and (name in names if name else number):
                needed[path][number] = names, text
                for other in read_in(text):
                    need(*other)

    def visit(path):
        """Adds a file to the order, after the files that it reads."""
        source = "".join(text for _, (_, text) in sorted(needed.pop(path).items()))
        for other in sorted({other for other, _ in read_in(source)}):
            if other in needed:
                visit(other)
        order[path] = source

    def name_in_program(match):
        return f"{Path(match[1]).stem}_{match[2]}" if taken[match[2]] > 1 else match[2]

    need(LOOP)
    taken = Counter(name for kept in needed.values() for name in {name for names, _ in kept.values() for name in names})
    visit(LOOP)
    parts = [f"{section}\n" for section in sections(set().union(*(lines for lines, _ in files.values())))]
    for path, source in order.items():
        banner = f"\n# -- {path}\n\n" if path.parts[0] in OURS else ""
        parts.append(banner + re.sub(DOCSTRING, first_paragraph, re.sub(QUALIFIED, name_in_program, source)))
    return "\n".join(part for part in parts if part.strip())


@cache
def parsed(text):
    """Returns the syntax tree of a statement."""
    return ast.parse(text).body[0]


IMPORTS = ast.Import | ast.ImportFrom | ast.Try  # or one that is tried
DOCSTRING = r'(?s:""".*?""")'
TEXT = rf'{DOCSTRING}|"[^"\n]*"|#.*'
NAME = r"(?<![\w.])(\w+)\b(?!=)(?:\.(\w+))?"  # and an attribute; not that of an argument
QUALIFIED = r"([\w/]+\.py)::(\w+)"


@cache  # stages have most statements in common
def read_in(text):
    """The definitions, (path, name), that qualified code reads."""
    return {(Path(path), name) for path, name in re.findall(QUALIFIED, text)}


@cache
def load(path, source, replaced=()):
    """Returns the imports of others and the statements of a folded file: ({line}, [({name that it defines}, text)]).

    In a text, one of our definitions is path::name, of its file. It is recognized by its name: no local variable
    may have the name of one of our definitions or modules.
    """
    modules, targets, lines, statements = {}, {}, set(), []  # {name: module}, {name: definition}
    for text in split(source):
        node = parsed(text)
        if not isinstance(node, IMPORTS):
            statements.append((names(node), text))
            targets |= {name: (path, name) for name in names(node)}
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else []:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.Import):
                lines.add(ast.unparse(ast.Import([alias])))
            elif node.module.partition(".")[0] not in OURS:
                lines.add(ast.unparse(ast.ImportFrom(node.module, [alias], 0)))
            elif path_of(module := f"{node.module}.{alias.name}"):
                modules[name] = module
            else:
                targets[name] = locate(node.module, alias.name), alias.name

    def qualify(match):
        name, attribute = match[1], match[2]
        if attribute and name in modules:
            target, rest = (locate(modules[name], attribute), attribute), ""
        elif name in targets:
            target, rest = targets[name], f".{attribute}" if attribute else ""
        else:
            return match[0]
        path, name = dict(replaced).get(target, target)
        return f"{path}::{name}{rest}"

    return lines, [(defined, re.sub(f"{TEXT}|{NAME}", qualify, text)) for defined, text in statements]


def first_paragraph(docstring):
    paragraph, more, _ = docstring[0].partition("\n\n")
    return f'{paragraph}"""' if more else paragraph


def names(node):
    """The names that a statement defines."""
    if isinstance(node, ast.Assign):
        return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {node.name} if hasattr(node, "name") else set()


def read(path):
    return (FOLDER / path).read_text(encoding="utf-8")


def path_of(module):
    """Returns the path of one of our modules, relative to the root; None if there is none."""
    path = Path(*module.split("."))
    paths = (path / "__init__.py", path.with_suffix(".py"))
    return next((path for path in paths if (FOLDER / path).is_file()), None)


@cache
def locate(module, name):
    """Returns the path, relative to the root, of the file that defines a name, which a package may pass on."""
    path = path_of(module)
    for node in ast.parse(read(path)).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return locate(node.module, name)
    return path
