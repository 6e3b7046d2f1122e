"""Partial evaluation of a program: replaces config fields by their values and removes the code that becomes unused."""

import ast
import contextlib
import itertools
import json
import re
import sys
from functools import cache

from lab.programs.edits import Edits, split

WIDTH = 120  # of a line
# Code that is known while a stage is off, as (reason, field, its value, replacement, calls or other expressions). {0}
# is a call's first argument; a statement that is left as None or x = x goes. train.py makes these calls at every stage;
# a shown program omits them.
CLIP = "torch.nn.utils.clip_grad_norm_({0}.parameters(), {1})"
DEVICE = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'
ONE, WHOLE = "there is one process", "a process has all weights"
NOT_SCALED = "a disabled GradScaler"
ALONE = "a program that runs alone checks nothing, ends at once on a signal, and has PyTorch's kernels alone"
NO_OPS = [
    (ONE, "ddp", False, "{0}", "parallel.all_reduce_mean", "parallel.add", "parallel.share", "parallel.local"),
    (ONE, "ddp", False, "{0}", "parallel.in_all_holders"),
    (ONE, "ddp", False, "{1}", "parallel.init_process_group", "parallel.synchronize_last"),
    (ONE, "ddp", False, "config.seed", "config.seed + parallel.rank()"),
    (ONE, "ddp", False, "{0}(torch.stack({1})).unbind()", "parallel.map_matrices"),
    ("no matrix is cut", "tensor_parallel", 1, "False", "is_reordered"),
    ("no matrix is cut", "tensor_parallel", 1, "1", "mesh().sizes.tensor"),
    ("no sequence is cut", "context_parallel", 1, "None", "positions"),
    ("the blocks are not divided", "pipeline_parallel", 1, "1", "mesh().sizes.pipeline"),
    ("nothing is cast", "dtype", "float32", "nullcontext()", "autocast"),
    (NOT_SCALED, "dtype", "float32", "None", "build_scaler", "scaler.unscale_", "scaler.update"),
    (NOT_SCALED, "dtype", "float32", "{0}", "scaler.scale"),
    (NOT_SCALED, "dtype", "float32", "{0}.step()", "scaler.step"),
    (NOT_SCALED, "dtype", "float32", "optim.check_finite({0}, {1})", "optim.check_finite"),
    (NOT_SCALED, "dtype", "float32", "Run({0}, {1}, {2})", "Run"),
    (ALONE, "standalone", True, "", "raise BadInput"),
    (ALONE, "standalone", True, "None", "check_processes", "check_grid", "machine.require_torchao", "meeting_place"),
    (ALONE, "standalone", True, "None", "allow_open_files", "heartbeat.start", "heartbeat.stop"),
    (ALONE, "standalone", True, "{0}.clone()", "flag.beside"),
    (ALONE, "standalone", True, "{0}", "flag.taken_from"),
    (ALONE, "standalone", True, 'int(os.environ.get("WORLD_SIZE", 1))', "n_launched"),
    (ALONE, "standalone", True, "False", "torch.are_deterministic_algorithms_enabled"),
    (ALONE, "standalone", True, "softmax.softmax_", "fastest_softmax"),
    (ALONE, "standalone", True, "False", "takes_exponentials"),
    (ALONE, "standalone", True, DEVICE, "machine.choose_device"),
    # a mesh of one dimension, data
    (WHOLE, "mesh", "data", "world_size()", "mesh().sizes.data"),
    (WHOLE, "mesh", "data", "rank()", "mesh().place.data"),
    (WHOLE, "mesh", "data", "None", "set_mesh", "divide", "count_sharing"),
    (WHOLE, "mesh", "data", CLIP, "parallel.clip_grad_norm_"),
]


def merge(modules, title):
    """Merges modules, {name: source}, into one program. The last module is the script, which imports the others.

    The title stands in place of the script's docstring.
    """
    docstrings, imports, bodies = [title], set(), []
    for source in modules.values():
        tree = ast.parse(source)
        head = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        docstrings.append(ast.get_docstring(tree))
        imports |= {ast.unparse(node) for node in head if getattr(node, "module", "") not in modules}
        bodies.append("\n".join(source.splitlines()[head[-1].end_lineno :]).strip("\n"))
    docstring = '"""' + "\n\n".join(docstrings[:-1]) + '\n"""'
    return "\n\n".join([docstring, *sections(imports), "\n\n\n".join(bodies)]) + "\n"


def sections(lines):
    """Import lines in order, in sections: the standard library, torch, this project."""
    lines = sorted(lines, key=import_order)
    return ["\n".join(section) for _, section in itertools.groupby(lines, key=lambda line: import_order(line)[0])]


def import_order(line):
    """Sort key of an import line: standard library, torch, then this project; `import x` before `from x`."""
    kind, name = line.split()[:2]
    package = name.partition(".")[0]
    section = 0 if package in sys.stdlib_module_names else 1 if package in ("numpy", "torch") else 2
    return section, kind == "from", name, line


def fold(source, values):
    """Replaces every `config.field` by its expression in values, {field: expression}, and simplifies the result."""
    return prune(settle(source, values))


def settle(source, values):
    """Substitutes known values and simplifies each statement, until nothing changes any more."""
    known = {f"config.{field}": value for field, value in values.items()}
    for _, field, value, replacement, *calls in NO_OPS:
        if values.get(field) == repr(value):
            known |= {call if re.search(r"[^\w.]", call) else f"{call}(": replacement for call in calls}
    statements = split(without_annotations(source))
    return "".join(settled(text, tuple(fact for fact in known.items() if fact[0] in text)) for text in statements)


@cache
def without_annotations(source):
    """Removes annotations of functions, and comments for the type checker: a shown program needs no types."""
    return re.sub(r"  # pyright: .*", "", Unannotated(source).result())


@cache  # stages have most statements in common
def settled(statement, known):
    return until_same(lambda text: Fold(text, dict(known)).result(), statement)


def prune(source):
    """Removes unused code, until nothing changes any more."""
    return until_same(lambda text: Prune(text).result(), source)


def until_same(change, source):
    before = None
    while source != before:
        before, source = source, change(source)
    return source


class Unannotated(Edits):
    """Writes functions without annotations, except operators: register() makes their schema from them."""

    def __init__(self, source):
        super().__init__(source)
        calls = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.code(node.func) == "register"
        ]
        self.operators = {self.code(argument) for call in calls for argument in call.args}

    def edit(self, node):
        if isinstance(node, ast.FunctionDef) and node.returns and node.name not in self.operators:
            for parameter in ast.walk(node.args):
                parameter.annotation = None
            written = ast.unparse(node.args).replace("'", '"')
            start, indent = self.starts[node.lineno - 1] + node.col_offset, "\n" + " " * node.col_offset
            if len(f"{indent}def {node.name}({written}):") > 1 + WIDTH:
                written = f"{indent}    {written}{indent}"
            self.edits[start, self.span(node.returns)[1]] = f"def {node.name}({written})"


class Fold(Edits):
    """Substitutes known, {code: replacement}, drops no-op calls, folds constants and resolves branches."""

    def __init__(self, source, known):
        super().__init__(source)
        self.known = known

    def truth(self, node):
        """Returns True or False for a known condition, else None. A share, such as a // 4, is not 0."""
        with contextlib.suppress(ValueError):
            return bool(ast.literal_eval(node))
        return True if isinstance(getattr(node, "op", None), ast.FloorDiv) else None

    def edit(self, node):
        match node:
            case ast.Attribute(value=owner, attr=field) if self.code(owner).split(".")[-1] == "config":
                if value := self.known.get(f"config.{field}"):
                    value = qualified(value, self.code(owner))
                    side = " " in value and isinstance(node.parent, ast.BinOp)
                    self.replace(node, f"({value})" if side else value)
            case ast.Call(func=function) if form := self.known.get(f"{self.code(function)}("):
                self.simplify(node, form.format(*(self.code(argument) for argument in node.args)))
            case ast.Attribute() | ast.BinOp() if form := self.known.get(self.code(node)):
                self.simplify(node, form)
            case ast.Compare():
                with contextlib.suppress(NameError, AttributeError, TypeError):
                    self.replace(node, repr(eval(self.code(node), {"__builtins__": {}})))
            case ast.UnaryOp(op=ast.Not()) if (known := self.truth(node.operand)) is not None:
                self.replace(node, repr(not known))
            case ast.BoolOp():
                self.decide(node)
            case ast.IfExp():
                same = self.code(node.body) == self.code(node.orelse)
                if (known := True if same else self.truth(node.test)) is not None:
                    self.replace(node, self.code(node.body if known else node.orelse))
            case ast.If():
                self.branch(node)
            case ast.With(items=[item]) if self.code(item.context_expr) == "nullcontext()":
                self.unwrap(node, node.body)
            case ast.Return():
                self.end(node)

    def simplify(self, call, code):
        """Replaces a no-op call; drops `None` and `x = x` that it leaves, and the comment on such a statement."""
        statement = call.statement
        if re.fullmatch(r"None|(.+) = \1", self.code(statement).replace(self.code(call), code)):
            self.remove(statement)
        else:
            self.replace(call, code)
            _, end = self.span(statement)
            comment = re.match(rb"( *#.*)?", self.bytes[end:])
            self.edits[end, end + comment.end()] = ""

    def decide(self, node):
        """Drops the operands of `and` or `or` that have no effect; one that decides replaces the whole expression."""
        kept = []
        for operand in node.values:
            known = self.truth(operand)
            if known is None or (operand is node.values[-1] and self.code(operand) not in ("True", "False")):
                kept.append(operand)
            elif known == isinstance(node.op, ast.Or):
                return self.replace(node, self.code(operand))
        if len(kept) < 2:
            self.replace(node, self.code([*kept, operand][0]))
        else:
            self.drop(operand for operand in node.values if operand not in kept)

    def branch(self, node):
        """Replaces a conditional by the branch that is taken, if that is known."""
        known, start, [other, *_] = self.truth(node.test), self.span(node)[0], [*node.orelse, None]
        is_elif, chained = (part is not None and self.code(part).startswith("elif") for part in (node, other))
        if "raise BadInput" in self.known and not other and self.code(node.body[-1]).startswith("raise BadInput("):
            self.remove(node)
        elif known and is_elif:
            self.edits[start, self.span(node.test)[1]] = "else"
            self.edits[self.span(node.body[-1])[1], self.span(node)[1]] = ""
        elif known:
            self.unwrap(node, node.body)
        elif known is False and not other:
            self.remove(node)
        elif known is False and chained:
            self.edits[start, self.span(other)[0] + 2 * (not is_elif)] = ""  # an `if` takes the place of its `elif`
        elif known is False and is_elif:
            self.edits[start, self.starts[self.first_line(other) - 1] + node.col_offset] = ""
        elif known is False:
            self.unwrap(node, node.orelse)

    def end(self, node):
        """Drops the statements after a return."""
        block = next(block for _, block in ast.iter_fields(node.parent) if isinstance(block, list) and node in block)
        for statement in block[block.index(node) + 1 :]:
            self.remove(statement)


def qualified(value, owner):
    """A value as code: a literal, or an expression of other keys of the owner."""
    try:
        value = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return re.sub(r"\b[a-z]\w*", rf"{owner}.\g<0>", value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


class Prune(Edits):
    """Drops unused functions, classes, methods, parameters, imports and assignments."""

    def __init__(self, source):
        super().__init__(source)
        self.reads, self.attributes = reads_by_scope(self.tree)
        self.names = self.reads[self.tree]
        called = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        # Functions that are passed to others, which call them with all of their parameters
        passed = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and id(node) not in called}
        functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
        # {function: positions of its unused parameters}
        self.unread = {function.name: self.unused(function) for function in functions if function.name not in passed}
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        methods = [node for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)]
        options = {method: [each.arg for each in optional(method.args)] for method in methods}
        read = {name for method, names in options.items() for name in names if name in self.reads[method]}
        self.unread_options = {name for names in options.values() for name in names} - read  # of any method

    def edit(self, node):
        """Removes an unneeded statement and unused parameters."""
        scope, needed = getattr(node, "scope", None), True
        match node:
            case ast.ClassDef(name=name):
                needed = name in self.names
            case ast.FunctionDef(name=name) if isinstance(scope, ast.Module):
                needed = name in self.names | {"_"}  # _: kept by its decorator
                self.drop(node.args.args[n] for n in self.unread.get(name, ()))
            case ast.FunctionDef(name=name):  # a method or a function inside; the loop calls forward and step
                called = self.attributes[self.tree] | self.reads[scope] | {"forward", "step"}
                needed = name in called or name.startswith("_")
            case ast.Import() | ast.ImportFrom():
                names = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
                needed = not self.names.isdisjoint(names)
                self.drop(alias for name, alias in names.items() if needed and name not in self.names)
            case ast.Assign(targets=[ast.Name(id=name)]) if not isinstance(scope, ast.ClassDef):
                pure = isinstance(scope, ast.Module) or "(" not in self.code(node)
                needed = name in self.reads[scope] or not pure
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr="config")], value=ast.Name()):
                needed = "config" in self.attributes[scope.scope]
            case ast.Call(func=ast.Name(id=name)):
                arguments = dict(enumerate([*node.args, *node.keywords]))
                self.drop(arguments[n] for n in self.unread.get(name, ()) if n in arguments)
            case ast.arg(arg=name) | ast.keyword(arg=name) if name in self.unread_options:
                self.drop([node])
        if not needed:
            self.remove(node)

    def unused(self, function):
        """Positions of a function's unused parameters."""
        names = self.reads[function]
        return tuple(n for n, parameter in enumerate(function.args.args) if parameter.arg not in names)


def optional(parameters):
    """Those of a function's parameters that have a default."""
    return parameters.args[len(parameters.args) - len(parameters.defaults) :]


def reads_by_scope(tree):
    """({scope: names that it reads}, {scope: attributes}), of a module and of each class and function in it."""
    names, attributes = {}, {}

    def visit(node, scopes):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            scopes = [*scopes, node]
            names[node], attributes[node] = set(), set()
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            reads, name = (names, node.id) if isinstance(node, ast.Name) else (attributes, node.attr)
            for depth, scope in enumerate(scopes, 1):
                if reads is attributes or name not in {inner.name for inner in scopes[depth:]}:  # not a recursive call
                    reads[scope].add(name)
        for child in ast.iter_child_nodes(node):
            visit(child, scopes)

    visit(tree, [])
    return names, attributes
