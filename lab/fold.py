"""Partial evaluation of a program: replaces config fields by their values and removes the code that becomes unused."""

import ast
import itertools
import json
import re
import sys
from functools import cache
from typing import NamedTuple

import libcst as cst
from libcst import matchers

from nanoladder.config import DEFAULTS

# Calls that are no-ops while their stage is off, and what is then known: {field: (values that turn it off, {call or
# expression: replacement})}. {0} is the first argument; None drops the statement. train.py makes these calls at every
# stage; a shown program omits them.
NO_OPS = {
    "ddp": (
        (False,),
        {
            "parallel.all_reduce_mean": "{0}",
            "parallel.add": "{0}",
            "parallel.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_({0}.parameters(), {1})",
            "parallel.distributed_data_parallel": "{0}",
            "parallel.rank": "0",
            "parallel.share": "{0}",
            "parallel.start": "{1}",
            "parallel.stop": None,
            "parallel.synchronize_last": "{1}",
        },
    ),
    "tensor_parallel": ((1,), {"parallel.apply_tensor_parallel": None, "mesh().sizes.tensor": "1"}),
    "context_parallel": (
        (1,),
        {"parallel.apply_context_parallel": None, "mesh().sizes.context": "1", "positions": "None"},
    ),
    "pipeline_parallel": (
        (1,),
        {
            "parallel.apply_pipeline_parallel": "{0}",
            "mesh().sizes.pipeline": "1",
            "getattr(model, 'parts', [model])": "[model]",
        },
    ),
    "tied": ((True,), {"optim.with_rates": "{0}", "optim.lr_of_group": "{0}"}),
    "optimizer_in_backward": ((False,), {"optim.update_in_backward": None}),
    "decay": (("decoupled",), {"optim.decay_cautiously": None}),
    "average": (("none",), {"optim.keep_average": None, "optim.averaged": "nullcontext()"}),
    "logit_softcap": ((0.0,), {"self.capped": "{0}"}),
    "dtype": (("float32",), {"machine.autocast": "{0}", "machine.unscale_gradients": None}),
    "optimizer": (("adamw", "adamw8bit"), {"optim.scale_lr": "{0}"}),
    # In programs that run alone: no refusals, and no kernels of other devices.
    "standalone": (
        (True,),
        {
            "machine.choose_device": 'torch.device("cuda" if torch.cuda.is_available() else "cpu")',
            "torch.are_deterministic_algorithms_enabled": "False",
            "check_processes": None,
            "check_grid": None,
            "check_8_bits": None,
            "machine.require_torchao": None,
            "fastest_softmax": "softmax.softmax_",
            "meeting_place": "None",
        },
    ),
    # In those with a mesh of one dimension, data: processes have all weights.
    "mesh": (
        ("data",),
        {
            "mesh().averaging": "world_size()",
            "mesh().place.data": "rank()",
            "mesh().sizes.data": "world_size()",
            "parallel.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_({0}.parameters(), {1})",
            "start_mesh": None,
            "divide": None,
            "count_sharing": None,
        },
    ),
}
# Parameters that are None while their field is False, and tables of what a field chooses.
TERMS = {"embedding_skip": "embedded", "value_embedding": "own_value"}
TABLES = {"NORMS[config.norm]": {"layer": "nn.LayerNorm", "rms": "NORMS['rms']"}}
REFUSED = matchers.SimpleStatementLine(body=[matchers.Raise(matchers.Call(matchers.Name("BadInput")))])
REFUSAL = matchers.If(body=matchers.IndentedBlock([matchers.ZeroOrMore(), REFUSED]), orelse=None)
RETURN = matchers.SimpleStatementLine(body=[matchers.Return()])


def merge(modules, title):
    """Merges modules, {name: source}, into one program. The last module is the script, which imports the others.

    The title stands in place of the script's docstring.
    """
    docstrings, imports, bodies = [], set(), []
    for source in modules.values():
        tree = ast.parse(source)
        head = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        docstrings.append(ast.get_docstring(tree))
        imports |= {ast.unparse(node) for node in head if module_of(node) not in modules}
        bodies.append("\n".join(source.splitlines()[head[-1].end_lineno :]).strip("\n"))
    lines = sorted(imports, key=import_order)
    sections = ["\n".join(line for line in lines if import_order(line)[0] == n) for n in range(3)]
    docstring = '"""' + "\n\n".join([title, *docstrings[:-1]]) + '\n"""'
    return "\n\n".join([docstring, *sections, "\n\n\n".join(bodies)]) + "\n"


def module_of(node):
    return node.module if isinstance(node, ast.ImportFrom) else node.names[0].name


def import_order(line):
    """Sort key of an import line: standard library, torch, then this project; `import x` before `from x`."""
    kind, name = line.split()[:2]
    package = name.partition(".")[0]
    entry = name == "nanoladder.entry"  # before torch loads, so that Ctrl-C is one line
    section = 0 if entry or package in sys.stdlib_module_names else 1 if package in ("numpy", "torch") else 2
    return section, entry, kind == "from", name, line


def fold(source, values):
    """Replaces every `config.field` by its expression in values, {field: expression}, and simplifies the result."""
    before = None
    while source != before:
        before, (source,) = source, prune([settle(source, values)])
    return source


def settle(source, values):
    """Replaces fields, and simplifies each statement, until nothing changes any more."""
    before = None
    while source != before:
        before, source = source, "".join(visited(text, Fold, values_in(text, values)) for text in split(source))
    return source


def values_in(statement, values):
    """The items of values that may change a statement."""

    def concerns(key):
        _, calls = NO_OPS.get(key, ((), ()))
        words = [key, TERMS.get(key, key), *calls]
        return key == "standalone" or any(word in statement.replace('"', "'") for word in words)

    return tuple(item for item in sorted(values.items()) if concerns(item[0]))


def prune(sources):
    """Drops from each file of a program what no file reads, until nothing changes any more."""
    before = None
    while sources != before:
        before, used = sources, usage("\n".join(sources))
        sources = ["".join(visited(text, Prune, *used_in(text, *used)) for text in split(source)) for source in before]
    return sources


def used_in(statement, names, attributes, unread):
    """The part of a program's usage that may change a statement."""
    words = set(re.findall(r"\w+", statement))
    unread = tuple((name, positions) for name, positions in unread.items() if name in words)
    return frozenset(names & words), frozenset(attributes & words), unread


def split(source):
    """The statements of a file, each with the lines between it and the one before."""
    lines, ends = source.splitlines(keepends=True), [node.end_lineno for node in ast.parse(source).body]
    return ["".join(lines[start:end]) for start, end in itertools.pairwise([0, *ends[:-1], len(lines)])]


@cache  # stages have most statements in common
def visited(statement, transformer, *known):
    """A statement after a pass of Fold or Prune, which is given what is known."""
    module = cst.parse_module(statement).visit(transformer(*known))
    return module.code if module.body else ""


def code(node):
    return cst.Module([]).code_for_node(node)


class Fold(cst.CSTTransformer):
    """Substitutes values, drops no-op calls, folds constants and resolves branches."""

    def __init__(self, values):
        self.values = dict(values)
        self.no_ops = no_ops(self.values)
        self.last_names = {call.rstrip(")").rpartition(".")[2] for call in self.no_ops if "()" in call}
        self.computed = set()  # values that depend on other keys, as code: unknown, but truthy
        self.terms = {name for field, name in TERMS.items() if self.values.get(field) == "False"}
        self.simplified = False  # True if a no-op call was replaced in this statement
        self.elifs = set()
        self.assigned = {}  # {variable: value} in this function so far; None if assigned twice

    def leave_Attribute(self, original, updated):
        field = original.attr.value
        if field in self.last_names and (known := self.no_ops.get(code(updated))):
            return cst.parse_expression(known)
        if field not in self.values or (owner := code(original.value)).split(".")[-1] != "config":
            return updated
        tree = ast.parse(self.values[field], mode="eval").body
        keys = {node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in DEFAULTS}
        if not keys:
            return literal(ast.literal_eval(tree))
        for node in keys:
            node.id = f"{owner}.{node.id}"
        self.computed.add(ast.unparse(tree))
        return cst.parse_expression(ast.unparse(tree))

    def leave_Subscript(self, original, updated):
        """Replaces a table's entry, where the config chooses it."""
        if (table := TABLES.get(code(original))) and (
            known := self.values.get(original.slice[0].slice.value.attr.value)
        ):
            return cst.parse_expression(table[ast.literal_eval(known)])
        return updated

    def leave_Parameters(self, original, updated):
        off = [n for n, parameter in enumerate(updated.params) if parameter.name.value in self.terms]
        return updated.with_changes(params=without(updated.params, off))

    def leave_With(self, original, updated):
        """Drops `nullcontext()`."""
        off = code(updated.items[0].item) == "nullcontext()"
        return splice(updated.leading_lines, updated.body) if off else updated

    def truth(self, node):
        """Returns True or False if the condition is known, else None."""
        if code(node) in self.computed:
            return True
        try:
            return bool(ast.literal_eval(code(node)))
        except (ValueError, SyntaxError):
            return None

    def compute(self, original, updated):
        """Evaluates an expression that changed and now contains only constants; returns others unchanged."""
        if updated.deep_equals(original):
            return updated
        try:
            return literal(eval(code(updated), {"__builtins__": {"int": int}}))
        except (NameError, AttributeError, TypeError, ValueError):  # after the first: in a branch that will be dropped
            return updated

    leave_Comparison = compute

    def leave_Call(self, original, updated):
        """Replaces a no-op call; in other calls, drops terms that are off."""
        name = code(updated.func)
        off = [n for n, argument in enumerate(updated.args) if code(argument.value) in self.terms]
        updated = updated.with_changes(args=without(updated.args, off))
        if name == "getattr" and (known := self.no_ops.get(code(updated).replace('"', "'"))):
            return cst.parse_expression(known)
        if name in self.no_ops:
            self.simplified = True
            form = self.no_ops[name]
            return cst.parse_expression(str(form).format(*(code(argument.value) for argument in updated.args)))
        return self.compute(original, updated) if name == "int" else updated

    def visit_SimpleStatementLine(self, node):
        self.simplified = False

    def leave_SimpleStatementLine(self, original, updated):
        """Drops `None` and `x = x` left by a no-op call, and any trailing comment on such a statement."""
        if not self.simplified:
            return updated
        match updated.body[0]:
            case cst.Expr(value=cst.Name(value="None")):
                return cst.RemoveFromParent()
            case cst.Assign(targets=[cst.AssignTarget(target=target)], value=value) if code(value) == code(target):
                return cst.RemoveFromParent()
        return updated.with_deep_changes(updated.trailing_whitespace, comment=None, whitespace=cst.SimpleWhitespace(""))

    def leave_BinaryOperation(self, original, updated):
        if isinstance(updated.operator, cst.Add) and code(updated.right) == "0":
            return updated.left
        for side in (updated.left, updated.right):
            if code(side) in self.computed:
                updated = updated.with_deep_changes(side, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return self.compute(original, updated)

    def leave_UnaryOperation(self, original, updated):
        known = self.truth(updated.expression)
        if isinstance(updated.operator, cst.Not) and known is not None:
            return literal(not known)
        return updated

    def leave_BooleanOperation(self, original, updated):
        def decides(side):
            return self.truth(side) == isinstance(updated.operator, cst.Or)

        if self.truth(updated.left) is not None:
            return updated.left if decides(updated.left) else updated.right
        if code(updated.right) in ("True", "False"):
            return updated.right if decides(updated.right) else updated.left
        return updated

    def leave_IfExp(self, original, updated):
        known = self.truth(updated.test)
        known = True if updated.body.deep_equals(updated.orelse) else known
        return updated if known is None else updated.body if known else updated.orelse

    def visit_If(self, node):
        if isinstance(node.orelse, cst.If):
            self.elifs.add(node.orelse)

    def leave_If(self, original, updated):
        known, orelse = self.truth(updated.test), updated.orelse
        if "standalone" in self.values and matchers.matches(updated, REFUSAL):
            return cst.RemoveFromParent()
        if known is None:
            alone = isinstance(updated.test, cst.NamedExpr)  # `a and (b := c)` needs its parentheses, `if b := c` none
            return updated.with_deep_changes(updated.test, lpar=[], rpar=[]) if alone else updated
        if original in self.elifs:
            return cst.Else(updated.body, updated.leading_lines) if known else orelse or cst.RemoveFromParent()
        if known:
            return splice(updated.leading_lines, updated.body)
        if isinstance(orelse, cst.If):
            return orelse.with_changes(leading_lines=updated.leading_lines)
        return splice(updated.leading_lines, orelse.body) if orelse else cst.RemoveFromParent()

    def visit_FunctionDef(self, node):
        self.assigned = {}

    def leave_Assign(self, original, updated):
        name = code(updated.targets[0].target)
        self.assigned[name] = None if name in self.assigned else updated.value
        return updated

    def leave_For(self, original, updated):
        """Unrolls a loop over one item."""
        items = self.assigned.get(code(updated.iter)) or updated.iter
        if not isinstance(items, cst.List) or len(items.elements) != 1:
            return updated
        assignment = cst.Assign([cst.AssignTarget(updated.target)], items.elements[0].value)
        first = cst.SimpleStatementLine([assignment], updated.leading_lines)
        return cst.FlattenSentinel([first, *updated.body.body])

    def leave_IndentedBlock(self, original, updated):
        """Drops code after a return, and a variable that is only assigned and returned."""
        ends = (n for n, line in enumerate(updated.body, 1) if matchers.matches(line, RETURN))
        body = updated.body[: next(ends, None)]
        match body[-2:]:
            case [
                cst.SimpleStatementLine(body=[cst.Assign(targets=[cst.AssignTarget(target)], value=value)]) as line,
                cst.SimpleStatementLine(body=[cst.Return(cst.Name() as name)]),
            ] if target.deep_equals(name):
                body = [*body[:-2], line.with_changes(body=[cst.Return(value)])]
        return updated.with_changes(body=body)


def no_ops(values):
    """Returns {call: replacement} for every stage that values, {field: expression}, turn off."""
    by_name = {}
    for field, (off, calls) in NO_OPS.items():
        if field in values and values[field] in map(repr, off):
            by_name |= calls
    return by_name


def literal(value):
    return cst.parse_expression(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value))


def splice(leading_lines, block):
    """Replaces a statement by the statements of its block, if any are left, and keeps the comments."""
    if not block.body:
        return cst.RemoveFromParent()
    first, *rest = block.body
    comments = [cst.EmptyLine(comment=block.header.comment)] if block.header.comment else []
    lines = [*leading_lines, *comments, *first.leading_lines]
    return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *rest])


class Prune(cst.CSTTransformer):
    """Drops unused functions, classes, methods, parameters, imports and assignments.

    names, attributes: those that the whole program reads. unread: (function, positions of its unused parameters).
    """

    def __init__(self, names, attributes, unread):
        self.scopes = [Reads(names, attributes)]  # of the module, then of the enclosing class and function
        self.unread = dict(unread)

    def enter(self, node):
        self.scopes.append(reads(ast.parse(code(node))))

    visit_ClassDef = visit_FunctionDef = enter

    def leave_ClassDef(self, original, updated):
        self.scopes.pop()
        return updated if original.name.value in self.scopes[0].names else cst.RemoveFromParent()

    def leave_FunctionDef(self, original, updated):
        self.scopes.pop()
        name = original.name.value
        if len(self.scopes) > 1:  # a method or a function inside; PyTorch calls forward
            called = name in self.scopes[0].attributes | self.scopes[-1].names | {"forward"} or name.startswith("_")
            return updated if called else cst.RemoveFromParent()
        if name not in self.scopes[0].names | {"_"}:  # _: kept by its decorator
            return cst.RemoveFromParent()
        return updated.with_deep_changes(
            updated.params, params=without(updated.params.params, self.unread.get(name, ()))
        )

    def leave_Call(self, original, updated):
        return updated.with_changes(args=without(updated.args, self.unread.get(code(original.func), ())))

    def leave_SimpleStatementLine(self, original, updated):
        statement = updated.body[0]
        match statement:
            case cst.Import() | cst.ImportFrom():
                kept = without(statement.names, [n for n, alias in enumerate(statement.names) if not self.reads(alias)])
                return updated.with_deep_changes(statement, names=kept) if kept else cst.RemoveFromParent()
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
                pure = len(self.scopes) == 1 or "(" not in code(statement)
                return updated if name in self.scopes[-1].names or not pure else cst.RemoveFromParent()
            case cst.Assign(
                targets=[cst.AssignTarget(target=cst.Attribute(value=cst.Name("self"), attr=attr))], value=cst.Name()
            ) if attr.value == "config":
                return updated if attr.value in self.scopes[-2].attributes else cst.RemoveFromParent()
        return updated

    def reads(self, alias):
        return (alias.evaluated_alias or alias.evaluated_name.partition(".")[0]) in self.scopes[0].names


def usage(source):
    """Returns what Prune has to know of a program: the names and attributes that it reads, and unused parameters."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    # Functions that are passed to others, which call them with all of their parameters
    passed = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    unread = {function.name: unused(function) for function in functions if function.name not in passed}
    return *reads(tree), unread


def unused(function):
    """Positions of a function's unused parameters."""
    names = reads(function).names
    return tuple(n for n, parameter in enumerate(function.args.args) if parameter.arg not in names)


class Reads(NamedTuple):
    names: set
    attributes: set


def reads(tree):
    """Names and attributes that the code reads."""
    loads = [part for part in ast.walk(tree) if isinstance(getattr(part, "ctx", None), ast.Load)]
    names = {part.id for part in loads if isinstance(part, ast.Name)}
    return Reads(names, {part.attr for part in loads if isinstance(part, ast.Attribute)})


def without(items, positions):
    """Removes the parameters, arguments or imported names at the positions."""
    kept = [item for n, item in enumerate(items) if n not in positions]
    if kept and positions:
        kept[-1] = kept[-1].with_changes(comma=items[-1].comma)
    return kept
