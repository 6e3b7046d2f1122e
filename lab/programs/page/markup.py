"""HTML elements whose texts cannot become markup."""

import html


class Markup(str):
    """Text that is markup already; any other is escaped."""


def tag(name, *children, **attributes):
    """Returns an element. In attributes' names, a trailing underscore goes and others become hyphens."""
    pairs = ((key.rstrip("_").replace("_", "-"), html.escape(str(value))) for key, value in attributes.items())
    opening = "".join(f' {key}="{value}"' for key, value in pairs)
    return Markup(f"<{name}{opening}>{join(*children)}</{name}>")


def join(*children):
    """Returns texts and elements as one piece of markup."""
    texts = (child if isinstance(child, Markup) else html.escape(child, quote=False) for child in children)
    return Markup("".join(texts))
