"""HTML elements whose texts cannot become markup."""

import html
import re

NOT_CLOSED = {"dd", "dt", "option", "td", "th", "tr"}  # the next one, or the end of the parent, closes it

BARE = re.compile(r"[\w.#/-]*\w")  # values that need no quotes


class Markup(str):
    """Text that is markup already; any other is escaped."""


def tag(name, *children, **attributes):
    """Returns an element. In attributes' names, a trailing underscore goes and others become hyphens."""
    pairs = ((key.rstrip("_").replace("_", "-"), html.escape(str(value))) for key, value in attributes.items())
    opening = "".join(f" {key}={value}" if BARE.fullmatch(value) else f' {key}="{value}"' for key, value in pairs)
    closing = "" if name in NOT_CLOSED else f"</{name}>"
    return Markup(f"<{name}{opening}>{join(*children)}{closing}")


def join(*children):
    """Returns texts and elements as one piece of markup."""
    return Markup(
        "".join(child if isinstance(child, Markup) else html.escape(child, quote=False) for child in children)
    )
