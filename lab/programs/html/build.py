"""Assembles the page: template.html, the stages' texts, programs, measurements, scripts and styles."""

import html
import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from string import Template

from lab.measure.machine import machine_in_words
from lab.programs import figures, glossary
from lab.programs.html import programs, rung_cards, stage_cards
from lab.programs.html.elements import Markup, join, tag
from lab.programs.sentences import gain
from lab.programs.stages import BOTH, describe, group
from nanoladder import files
from nanoladder.config.stages import RECIPE_DIR, tree
from nanoladder.errors import writing

FOLDER = Path(__file__).parent
GROUPS = {"speed": "Speed, on by default", "memory": "Memory, on request", "devices": "Many devices"}
GROUPS |= {"precision": "Lower precision, on request", "recipe": "Recipe: token efficiency"}
HOW_TO_READ = "Climb with ← →: each stage is one change, marked in the program; beside it stands what a step gains."


def write(path: Path, paths: Iterable[Path] = ()) -> None:
    """Writes the page to a file, whose folders it makes. Raises BadInput as page() does, or if it cannot be written.

    paths: of a reader's own runs.jsonl files.
    """
    text = page(paths)
    with writing(path, "--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)


def page(paths=()):
    """Returns the whole page as HTML; the same on every machine.

    Raises BadInput if one of the reader's own files has nothing to show.
    """
    figures.check(paths)
    lines, ladder = programs.table()
    return Template(read("template.html")).substitute(
        theme=read("theme.js"),
        style=read("page.css"),
        machines=stage_cards.options(paths),
        bases=join(*(tag("option", name, value=name) for name in BOTH)),
        rail=rail(),
        stages="\n".join(article(describe(name, paths)) for name in BOTH),
        lines="\n".join(lines),
        words=words(),
        ladder=embedded(ladder),
        script=read("climb.js"),
    )


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def embedded(value):
    """Returns JSON that cannot end the <script> element around it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def rail():
    """Returns the list of stages, branches set in, with a heading at the first stage of each group."""
    items, before = [], None
    for lines, name in [*tree(), *tree(RECIPE_DIR)]:
        if group(name) != before:
            before = group(name)
            items.append(f"<li class=group>{GROUPS[before]}</li>")
        items.append(f"<li class=depth{len(lines) // 2}><a href=#{name}>{name}</a></li>")
    return "\n".join(items)


def article(stage):
    """Returns the article on a stage: its reason, measurements, explanation and what it newly calls."""
    name, cards = stage.name, rung_cards if stage.group == "recipe" else stage_cards
    title = f"<h2>{name}</h2>\n<p class=reason>{inline(stage.reason)}</p>"
    more = tag("p", stage.change, class_="change") if stage.below else opening(stage)
    return (
        f"<article id={name} class=stage aria-label={name}>\n<header>\n{title}\n{more}\n</header>\n"
        f"{cards.section(stage)}\n"
        f"<div class=text>\n{text(stage)}\n</div>\n"
        f'<div class="code mechanism">\n{programs.mechanism(stage)}\n</div>\n</article>'
    )


def opening(stage):
    """Returns the first stage's opening: the gain of all stages, and how to read the page."""
    if stage.group == "recipe":
        text = "The second ladder makes a step worth more: the same loss after fewer tokens."
        return tag("p", text, class_="opening")
    _, _, results, rows = figures.shown()
    more = f" Measured on {machine_in_words(results['machine'])}. {HOW_TO_READ}"
    return tag("p", tag("strong", gain(rows.values())), more, class_="opening")


def text(stage):
    """Returns a stage's explanation as HTML: its introduction, then a list of the labeled parts and the sources."""
    links = (tag("a", inline(title), href=address, rel="noreferrer") for title, address in stage.sources)
    sources = "\n".join(["<ul>", *(f"<li>{link}</li>" for link in links)])
    parts = {label: prose(text) for label, text in stage.parts.items()} | {"Source": f"{sources}</ul>"}
    labeled = [f"<dt>{label}</dt>\n<dd>{text}</dd>" for label, text in parts.items()]
    return "\n".join([prose(stage.introduction), "<dl>", *labeled, "</dl>"])


def prose(text):
    """Returns paragraphs of Markdown, and indented formulas, as HTML."""
    blocks = [block for block in re.split(r"\n{2,}", text) if block]
    return "\n".join(
        f"<pre>{html.escape(textwrap.dedent(block), quote=False)}</pre>"
        if block.startswith("    ")
        else f"<p>{inline(block)}</p>"
        for block in blocks
    )


def inline(text):
    """Escapes a text for HTML. `code` becomes an element, and a word of the glossary a button that explains it."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return Markup(glossary.LINK.sub(r"<button type=button class=word popovertarget=word-\2>\1</button>", text))


def words():
    """Returns the glossary's words, each of which appears when its button is pressed."""
    return "\n".join(
        f"<p id=word-{glossary.anchor(word)} class=meaning popover><b>{word}</b>: {inline(text)}</p>"
        for word, text in glossary.words().items()
    )
