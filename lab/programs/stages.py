"""A stage of the first ladder or a rung of the second, with all that its pages show.

`describe` collects it: the parts of its docstring, its change of the program, and its figures. markdown.py and html/
render it.
"""

import dataclasses
import re
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

from lab.programs import diffs, figures, glossary
from lab.programs.bundle import standalone
from nanoladder.config import DEFAULTS, stage_names
from nanoladder.config.stages import (
    RECIPE_DIR,
    STAGES_DIR,
    fields,
    fields_up_to,
    files,
    ladder_of,
    needs_several,
    paragraphs,
    stage_below,
    stage_path,
)
from nanoladder.errors import BadInput, nearest

BOTH = [*stage_names(STAGES_DIR), *stage_names(RECIPE_DIR)]  # names of all stages and rungs
LABELS = ("Stands on", "What", "Why", "Cost", "Tried", "Try", "Source")  # of a docstring's parts, in this order
SOURCE = re.compile(r"- (.+):\s+(https://\S+)")
SAME = "The program is the same; the definitions that it calls change:"  # of a stage whose program has no diff


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage or rung. The texts of its docstring are Markdown, with links to the glossary.

    below: the stage or rung that it stands on; None for the first. group: as group() names it. change: its assignment,
    "field: from → to"; empty for the first. parts: {label: text} of its docstring, without the sources, which are
    [(title, address)]. figures: of a stage [figures.Measured], of a rung {machine: [figures.Scale]}.
    """

    name: str
    below: str | None
    group: str
    change: str
    reason: str
    introduction: str
    parts: dict
    sources: list
    figures: list | dict

    @property
    def program(self):
        return diffs.script(self.name)

    @cached_property
    def diff(self):
        """Lines that it changes in the program below, headed by functions; else in the definitions that it calls."""
        return self.short_diff(diffs.script) or self.short_diff(standalone)

    @cached_property
    def same_program(self):
        """True if it changes only definitions that the program calls, not the program."""
        return self.below is not None and self.program == diffs.script(self.below)

    @property
    def definitions(self):
        """[(path, source)] of our definitions that its program newly calls."""
        return diffs.definitions(self.below, self.name)

    def short_diff(self, program):
        lines = diffs.diff(self.below, self.name, program)  # pyright: ignore
        return "\n".join(re.sub("^@@ .* @@", "@@", line).rstrip() for line in lines).rstrip()


@cache
def describe(name: str, paths: Iterable[Path] = ()) -> Stage:
    """Returns the Stage of a stage or rung; its figures include those of a reader's own runs.jsonl at these paths.

    Raises BadInput if the name is unknown, or the docstring malformed, with its line.
    """
    reason, introduction, parts, sources = explanation(name)
    introduction, *texts = glossary.link([introduction, *parts.values()])
    parts = dict(zip(parts, texts, strict=True))
    measured = figures.rung_scales(name) if group(name) == "recipe" else figures.stage_figures(name, paths)
    return Stage(name, stage_below(name), group(name), change(name), reason, introduction, parts, sources, measured)


def explanation(name):
    """Returns the parts of a docstring: its first line, the introduction, {label: text}, and [(title, address)].

    Raises BadInput with the file and line of a malformed part.
    """
    (number, _, reason), (_, _, introduction), *labeled = paragraphs(name)
    folder = ladder_of(name)

    def check(right, number, wrong):
        if not right:
            raise BadInput(f"{files(folder)[name]} line {number}: {wrong}; the files beside it are examples")

    check(reason, number, "expected a docstring that begins with one line on what the stage does")
    known, parts = list(LABELS), {}
    for number, label, text in labeled:
        check(label in LABELS, number, f"unknown part {label!r}{nearest(label, LABELS)}; expected {', '.join(LABELS)}")
        check(label in known, number, f"{label} comes twice or too late; expected the order {', '.join(LABELS)}")
        check(text, number, f"{label} is empty; expected a text")
        stage = label != "Stands on" or text in stage_names(folder)
        check(stage, number, f"Stands on {text!r}: no such stage{nearest(text, stage_names(folder))}")
        del known[: known.index(label) + 1]
        parts[label] = text
    required = ["What", "Why", "Cost", *(["Tried"] if folder != RECIPE_DIR else []), "Try", "Source"]
    missing = [label for label in (required if stage_below(name) else ["Try", "Source"]) if label not in parts]
    check(not missing, number, f"no {' and no '.join(missing)} in the docstring, which ends here")
    sources = []
    for item in re.split(r"\n(?=- )", parts.pop("Source")):
        source = SOURCE.fullmatch(item)
        check(source, number + 1, "expected a source, - TITLE: https://ADDRESS")
        sources.append(source.groups())
        number += 1 + item.count("\n")
    return reason, introduction, parts, sources


def group(name: str) -> str:
    """Names the group of a stage: recipe, devices if it needs several, memory if it is checkpointing or stands on it.

    Of the others: speed if its key is on by default, else precision.
    """
    if ladder_of(name) == RECIPE_DIR:
        return "recipe"
    if needs_several(name):
        return "devices"
    if "checkpointing" in stage_path(name):
        return "memory"
    off = fields("naive")
    on = name == "naive" or any(repr(DEFAULTS[field]) != off[field] for field in fields(name))
    return "speed" if on else "precision"


def change(name: str) -> str:
    """Describes the assignment of a stage, "field: from → to"; empty for the first."""
    before = fields_up_to(below) if (below := stage_below(name)) else {}
    changed = {field: value for field, value in fields(name).items() if before and before[field] != value}
    return ", ".join(f"{field}: {before[field]} → {value}" for field, value in changed.items())
