"""BadInput, the exception that ends a program with one line, and how others become one."""

import contextlib
import difflib


class BadInput(Exception):
    """Raised for invalid input. Its message, one line, says what is wrong, where, what was expected and what to do."""


@contextlib.contextmanager
def reading(said, advice):
    """Turns any error in the `with` block into BadInput, "said (error); advice": damaged files fail in many ways."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{said} ({reason:.300}); {advice}") from None


def nearest(name, names, key=str):
    """A question that names the closest of the valid names, or "" if none is close. Compares key(name), a text.

    A name of initials, such as lr, is closest to what they stand for.
    """
    names = {key(valid): valid for valid in names}
    spelled_out = [text for text in names if "_" in text and initials(text) == key(name)]
    close = spelled_out or difflib.get_close_matches(key(name), names, n=1)
    return f", did you mean {names[close[0]]!r}?" if close else ""


def initials(text):
    return "".join(word[:1] for word in text.split("_"))
