"""Expressions in config files: arithmetic on the keys set before. Nothing else can run, and no value grows large.

    learning_rate = 1e-3 * batch_size / 32            # linear scaling, for SGD (Goyal et al. 2017)
    learning_rate = 6e-4 * (batch_size / 480) ** 0.5  # square-root scaling, for AdamW and its like

The square root keeps the noise of an update as it was at the batch that the rate was found for (Krizhevsky 2014;
Malladi et al. 2022 for Adam). A batch_size from the command line counts in these lines too.
"""

import ast
import operator
from itertools import pairwise

LONGEST_TEXT = 1000  # characters in a value

# Operators that are allowed, besides constants, keys, `if`, `and`, `or`, min and max.
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(node, names):
    """Value of an expression's syntax tree. names: {key: value} set so far. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=value):
            pass
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"{short(name)} is not defined")
            return names[name]
        case ast.UnaryOp(op=op, operand=operand):
            value = calculate(op, evaluate(operand, names))
        case ast.BinOp(left=left, op=op, right=right):
            value = calculate(op, evaluate(left, names), evaluate(right, names))
        case ast.Compare(left=left, ops=ops, comparators=others):
            terms = pairwise(evaluate(term, names) for term in (left, *others))
            value = all(calculate(op, *pair) for op, pair in zip(ops, terms, strict=True))
        case ast.BoolOp(op=op, values=terms):
            for term in terms:
                value = evaluate(term, names)
                if bool(value) is isinstance(op, ast.Or):  # decided: later terms are not evaluated
                    break
        case ast.IfExp(test=test, body=body, orelse=other):
            return evaluate(body if evaluate(test, names) else other, names)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as args, keywords=[]):
            return {"min": min, "max": max}[name](evaluate(argument, names) for argument in args)
        case _:
            raise ValueError("only values, keys, arithmetic, comparisons, `if`, and min or max of them are allowed")
    if (isinstance(value, int) and abs(value) >= 2**64) or (isinstance(value, str) and len(value) > LONGEST_TEXT):
        raise ValueError("too large")
    return value


def calculate(op, *values):
    """Applies an operator to numbers, or joins or compares strings. Raises ValueError if the result could be huge."""
    texts = all(isinstance(value, str) for value in values) and isinstance(op, ast.Add | ast.cmpop)
    if type(op) not in OPERATORS or not (texts or all(isinstance(value, int | float) for value in values)):
        raise ValueError("only arithmetic on numbers, and `+` of texts, is allowed")
    if isinstance(op, ast.Pow) and abs(values[1]) > 64:
        raise ValueError("the exponent is beyond 64")
    return OPERATORS[type(op)](*values)


def short(text):
    """Cuts text to 80 characters for a message."""
    return text if len(text) <= 80 else text[:77] + "..."
