"""Edits to a source by the nodes of its syntax tree, which leave the rest exactly as written."""

import ast
import itertools
import re
from functools import cache

GONE = "\0"  # in place of an item that is dropped: an argument, a parameter, an operand, an imported name
ITEM = rf"{GONE}(?:=[^,()]*)?"  # with a default
DROPPED = re.compile(rf"{ITEM}(?:,| and| or)\s+|(?:(?:,| and| or)\s+)?{ITEM}")


@cache  # stages have most files in common
def split(source: str) -> tuple[str, ...]:
    """The statements of a file, each with the lines between it and the one before."""
    lines, ends = source.splitlines(keepends=True), [node.end_lineno for node in ast.parse(source).body]
    return tuple("".join(lines[start:end]) for start, end in itertools.pairwise([0, *ends[:-1], len(lines)]))


class Edits:
    """Edits to a source by the nodes of its syntax tree; the rest is left exactly as written."""

    def __init__(self, source):
        self.bytes, self.tree = source.encode(), ast.parse(source)  # columns count bytes
        self.lines = self.bytes.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]  # of the lines
        self.edits = {}  # {(start, end): replacement}

    def result(self):
        """The source after the edits of all nodes; one inside another waits for the next pass."""
        nodes = [self.tree]
        for node in nodes:
            for child in ast.iter_child_nodes(node):
                child.parent = node
                child.statement = child if isinstance(child, ast.stmt) else node.statement
                child.scope = node if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else node.scope
                if not isinstance(child, ast.JoinedStr):  # has no positions of its parts before Python 3.12
                    nodes.append(child)
        for node in nodes:
            self.edit(node)
        parts, at = [], 0
        for (start, end), text in sorted(self.edits.items()):
            if start >= at:
                parts += [self.bytes[at:start], text.encode()]
                at = end
        return DROPPED.sub("", b"".join([*parts, self.bytes[at:]]).decode())

    def span(self, node):
        """Start and end of a node."""
        start, end = node.col_offset, node.end_col_offset
        return self.starts[node.lineno - 1] + start, self.starts[node.end_lineno - 1] + end

    def code(self, node):
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def replace(self, node, code):
        self.edits[self.span(node)] = code

    def drop(self, items):
        """Drops items of a list, with the commas or operators between them."""
        self.edits |= dict.fromkeys(map(self.span, items), GONE)

    def first_line(self, statement):
        """Number of a statement's first line, counting the comments and blank lines above it."""
        line = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", []))) - 1
        while line and self.lines[line - 1].strip()[:1] in (b"", b"#"):
            line -= 1
        return line

    def remove(self, statement):
        """Removes a statement, but not one that is alone in its block: that goes with the block."""
        block = statement.parent
        if isinstance(block, ast.Module) or [statement] not in (block.body, getattr(block, "orelse", None)):
            self.edits[self.starts[self.first_line(statement)], self.starts[statement.end_lineno]] = ""

    def unwrap(self, statement, block):
        """Replaces a compound statement by one of its blocks, below its header's comment."""
        first_line, indent = self.first_line(block[0]), b" " * statement.col_offset
        text = b"".join(indent + line + b"\n" for line in re.findall(rb":  (#.*)", self.lines[first_line - 1]))
        for line in self.lines[first_line : block[-1].end_lineno]:
            text += line[block[0].col_offset - statement.col_offset :] if line.strip() else line
        self.edits[self.starts[statement.lineno - 1], self.starts[statement.end_lineno]] = text.decode()
