"""HTML elements whose texts cannot become markup, and the page's cards, tables and bars."""

import html

from lab.programs.stages import BOTH


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


def card(machine, name, *content, **attributes):
    return tag("article", tag("h3", machine, " ", tag("small", name)), *content, class_="card", **attributes)


def table(kind, label, rows, headings=(), now=None):
    """A table for the eye and, by its label, for a screen reader. now: heading of the row that is marked."""
    head = [tag("thead", tag("tr", *(tag("th", heading) for heading in headings)))] if headings else []
    lines = []
    for heading, *cells in rows:
        marked = {"class_": "now"} if heading == now else {}
        lines.append(tag("tr", tag("th", heading), *(tag("td", cell) for cell in cells), **marked))
    return tag("table", *head, tag("tbody", *lines), class_=kind, aria_label=label)


def bars_table(label, bars, now, scale):
    """A table of bars, (text, name, {part: value}, mark), divided into their parts; a name is a link to the stage."""
    rows = []
    for text, name, parts, mark in bars:
        paths, start = [], 0.0
        for part, value in parts.items():
            width = 100 * max(0.0, value) / scale
            if width >= 0.05:
                paths.append(f'<path class={part.split()[0]} d="M{start:.1f} 1h{width:.1f}"/>')
            start += width
        if mark:
            paths.append(f'<path class=limit d="M{100 * mark / scale:.1f} 0v2"/>')
        # The numbers stand beside it: no screen reader needs the picture.
        picture = f'<svg viewBox="0 0 100 2" preserveAspectRatio=none aria-hidden=true>{"".join(paths)}</svg>'
        link = tag("a", name, href=f"#{name}") if name in BOTH and name != now else name
        rows.append((link, Markup(picture), text))
    return table("bars", label, rows, now=now)
