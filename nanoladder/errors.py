"""The exception that ends a program in one line."""


class BadInput(Exception):
    """Input that cannot work. The message is one line: what is wrong, where, what was expected, what to do."""
