"""BadInput, the exception that ends a program with one line."""


class BadInput(Exception):
    """Raised for invalid input. Its message, one line, says what is wrong, where, what was expected and what to do."""
