"""BadInput, the exception that ends a program with one line."""

import difflib


class BadInput(Exception):
    """Raised for invalid input. Its message, one line, says what is wrong, where, what was expected and what to do."""


def nearest(name, names):
    """A question that names the closest of the valid names, or "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
