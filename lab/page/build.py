"""Assembles docs/ladder.html: template.html, the stages' texts, programs, measurements, scripts and styles."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from string import Template

from lab import pages
from lab.page import figures, programs
from nanoladder import files
from nanoladder.config import DEFAULTS, stage_names
from nanoladder.config.stages import fields, reason

FOLDER = Path(__file__).parent
PAGE = pages.FOLDER / "docs" / "ladder.html"
SCRIPTS = ("figures.js", "dropped.js", "worth.js", "climb.js")  # in order, at the end; theme.js stands in the head
GROUPS = {"speed": "Speed, on by default", "memory": "Memory, on request", "devices": "Many devices"}


def write():
    """Writes docs/ladder.html."""
    PAGE.parent.mkdir(exist_ok=True)
    files.write(PAGE, page())


def page():
    """Returns the whole page as HTML; the same on every machine."""
    lines, ladder = programs.table()
    theme, scripts = read("theme.js"), list(map(read, SCRIPTS))
    style = read("page.css") + read("worth.css")
    return Template(read("template.html")).substitute(
        policy=policy([theme, *scripts], style),
        theme=theme,
        style=style,
        rail=rail(),
        stages="\n".join(map(article, stage_names())),
        lines="\n".join(lines),
        ladder=embedded(ladder),
        figures=embedded(figures.figures()),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def policy(scripts, style):
    """Returns a Content-Security-Policy that runs these scripts and this style, and loads nothing from anywhere."""
    allowed = " ".join(map(digest, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {digest(style)}; base-uri 'none'; form-action 'none'"


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(value):
    """Returns JSON that cannot end the <script> element around it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def rail():
    """Returns the list of stages, with a heading at the first stage of each group."""
    names, items = stage_names(), []
    for n, name in enumerate(names):
        if n == 0 or group(names[n - 1]) != group(name):
            items.append(f"<li class=group>{GROUPS[group(name)]}</li>")
        items.append(f"<li><a href=#{name}>{name}</a></li>")
    return "\n".join(items)


def group(stage):
    """Names the group of a stage: devices if it needs several, speed if its key is on by default, else memory."""
    if stage in pages.SCALING:
        return "devices"
    off = fields("naive")
    on = stage == "naive" or any(repr(DEFAULTS[field]) != off[field] for field in fields(stage))
    return "speed" if on else "memory"


def article(stage):
    """Returns the article on a stage: its reason, explanation, diff and measurements."""
    title = f"<h2>{stage}</h2>\n<p class=reason>{inline(reason(stage))}</p>"
    changed = f"\n<p class=change>{html.escape(pages.change(stage), quote=False)}</p>" if pages.change(stage) else ""
    return (
        f"<article id={stage} class=stage aria-label={stage}>\n<header>\n{title}{changed}\n</header>\n"
        f"<div class=text>\n{text(pages.explanation(stage))}\n</div>\n"
        f'<div class="code static">\n{programs.static(stage)}\n</div>\n'
        f"<section class=worth data-stage={stage}>\n{figures.static_html(stage)}\n</section>\n</article>"
    )


def text(markdown):
    """Returns a stage's explanation as HTML: paragraphs, then a list of its What, Why, Cost and Source."""
    free, labeled = [], []
    for block in re.split(r"\n\s*\n", markdown):
        label, rest = re.fullmatch(r"(?:\*\*(\w+):\*\*\s*)?(.*)", block, flags=re.DOTALL).groups()
        if not label:
            free.append(f"<p>{inline(rest)}</p>")
            continue
        links = re.findall(r"^- \[(.*)\]\((https://\S+)\)$", rest, flags=re.MULTILINE)
        items = [f'<li><a href="{html.escape(url)}" rel=noreferrer>{inline(title)}</a></li>' for title, url in links]
        content = "<ul>\n" + "\n".join(items) + "\n</ul>" if items else inline(rest)
        labeled.append(f"<dt>{label}</dt>\n<dd>{content}</dd>")
    return "\n".join([*free, "<dl>", *labeled, "</dl>"])


def inline(text):
    """Escapes a text for HTML; `code` in it becomes an element."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
