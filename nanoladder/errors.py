"""What ends a program in one line: bad input."""


class BadInput(Exception):
    """What the user gave cannot work: the message is one line (what, where, what was expected, what to do)."""
