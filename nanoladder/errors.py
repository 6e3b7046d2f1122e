"""BadInput, the exception that ends a program with a one-line message, and conversion of other errors to it."""

import contextlib
import difflib
import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


class BadInput(Exception):
    """Raised for invalid input. Its message, one line, says what is wrong, where, what was expected and what to do."""


@contextlib.contextmanager
def reading(problem: str, advice: str) -> Iterator[None]:
    """Turns any error in the `with` block into BadInput, "problem (error); advice": damaged files fail in many ways."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{problem} ({reason:.300}); {advice}") from None


@contextlib.contextmanager
def writing(path: Path | str, other: str = "--out_dir") -> Iterator[None]:
    """Turns an OSError in the `with` block into BadInput: the path cannot be written, another `other` can."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error}); choose another {other}") from None


def lacks_memory(error: BaseException) -> bool:
    """True if memory could not be allocated or mapped, which says nothing about the file being read."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def nearest(name: str, names: Iterable[str], key: Callable[[str], str] = str) -> str:
    """Returns a question that suggests the closest valid name, or "" if none is close. Compares key(name), a text.

    Initials, such as lr, are closest to the name that they abbreviate.
    """
    names = {key(valid): valid for valid in names}
    spelled_out = [text for text in names if "_" in text and initials(text) == key(name)]
    close = spelled_out or difflib.get_close_matches(key(name), names, n=1)
    return f", did you mean {names[close[0]]!r}?" if close else ""


def initials(text):
    return "".join(word[:1] for word in text.split("_"))
