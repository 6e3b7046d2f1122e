"""Assembles docs/ladder.html: template.html, the stages' texts, programs, measurements, scripts and styles."""

import html
import json
import re
from pathlib import Path
from string import Template

from lab.measure import tables
from lab.measure.results import read_results
from lab.programs import pages
from lab.programs.page import figures, programs, rungs
from lab.programs.page.markup import join, tag
from nanoladder import files
from nanoladder.config.stages import RECIPE_DIR, reason, stage_below, tree
from nanoladder.errors import BadInput

FOLDER = Path(__file__).parent
PAGE = pages.FOLDER / "docs" / "ladder.html"
GROUPS = {"speed": "Speed, on by default", "memory": "Memory, on request", "devices": "Many devices"}
GROUPS["recipe"] = "Recipe: what a step is worth"
HOW_TO_READ = "Climb with ← →: each stage is one change, marked in the program; beside it stands what a step gains."


def write(own=()):
    """Writes docs/ladder.html or, with a reader's results, ladder.html beside the first of them. Returns its path."""
    path = own[0].with_name(PAGE.name) if own else PAGE
    files.write(path, page(own))
    return path


def page(own=()):
    """Returns the whole page as HTML; the same on every machine.

    Raises BadInput if one of the reader's own files has nothing to show.
    """
    for path in own:
        if not read_results(path)["modes"].keys() & {"ladder", *pages.SCALING.values()}:
            raise BadInput(f"{path} holds no stages; expected a runs.jsonl of --mode=ladder or scaling")
    lines, ladder = programs.table()
    return Template(read("template.html")).substitute(
        theme=read("theme.js"),
        style=read("page.css"),
        machines=figures.options(own),
        bases=join(*(tag("option", name, value=name) for name in pages.BOTH)),
        rail=rail(),
        stages="\n".join(article(stage, own) for stage in pages.BOTH),
        lines="\n".join(lines),
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
        if pages.group(name) != before:
            before = pages.group(name)
            items.append(f"<li class=group>{GROUPS[before]}</li>")
        items.append(f"<li class=depth{len(lines) // 2}><a href=#{name}>{name}</a></li>")
    return "\n".join(items)


def article(stage, own):
    """Returns the article on a stage: its reason, measurements, explanation and what it newly calls."""
    title = f"<h2>{stage}</h2>\n<p class=reason>{inline(reason(stage))}</p>"
    more = tag("p", pages.change(stage), class_="change") if stage_below(stage) else opening(stage)
    measured = rungs.section(stage) if pages.group(stage) == "recipe" else figures.section(stage, own)
    return (
        f"<article id={stage} class=stage aria-label={stage}>\n<header>\n{title}\n{more}\n</header>\n"
        f"{measured}\n"
        f"<div class=text>\n{text(pages.explanation(stage))}\n</div>\n"
        f'<div class="code mechanism">\n{programs.mechanism(stage)}\n</div>\n</article>'
    )


def opening(stage):
    """Says on the first stage of a ladder what all of them gain, and how to read the page."""
    if pages.group(stage) == "recipe":
        return tag("p", "The second ladder makes a step worth more: the same loss after fewer tokens.")
    results, rows = pages.reference()
    more = f" Measured on {tables.machine_in_words(results['machine'])}. {HOW_TO_READ}"
    return tag("p", tag("strong", pages.gain(rows.values())), more)


def text(markdown):
    """Returns a stage's explanation as HTML: paragraphs, then a list of its labeled ones."""
    items = re.sub(
        r"^- \[(.*)\]\((\S+)\)$", r'<li><a href="\2" rel="noreferrer">\1</a></li>', inline(markdown), flags=re.M
    )
    items = re.sub(r"(<li>.*</li>\n?)+", lambda links: f"<ul>\n{links[0]}</ul>", items)
    blocks = re.split(r"\n\s*\n", items)
    free = [f"<p>{block}</p>" for block in blocks if not block.startswith("**")]
    labeled = [re.sub(r"^\*\*(.*?):\*\*\s*", r"<dt>\1</dt>\n<dd>", f"{block}</dd>") for block in blocks[len(free) :]]
    return "\n".join([*free, "<dl>", *labeled, "</dl>"])


def inline(text):
    """Escapes a text for HTML; `code` in it becomes an element."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
