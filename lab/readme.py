"""The README's ladder: a row for each stage, and what was measured of it in pages.MEASURED."""

import re
import textwrap

from lab import pages, tables
from nanoladder import files
from nanoladder.config import stage_names
from nanoladder.config.stages import fields, reason, stage_below

README = pages.FOLDER / "README.md"
HEADING = "## The ladder\n\n"
PARAGRAPH = (
    "Speed and memory (the peak bytes of all tensors) compare a step with the stage that it stands on; ≈ 1 means no "
    "measurable change. [config/reference.py](config/reference.py), {parameters:.1f} million parameters, on "
    "[{machine}]({folder}/table.md). {gain}"
)


def write():
    """Brings the README's table, and the paragraph below it, up to date."""
    files.write(README, text())


def text():
    """Returns the README with the two blocks below HEADING written anew; what the table says of a stage stays."""
    before, _, rest = README.read_text(encoding="utf-8").partition(HEADING)
    old, _, after = rest.split("\n\n", 2)
    said = dict(re.findall(r"^\| \[(\w+)\]\S* \| (.*?) \|", old, re.MULTILINE))
    _, results, rows = pages.summaries("ladder")[0]
    rows = {name: row for name, row in rows.items() if "peak" in row}
    lines = ["| stage | what it does | field | speed | memory |", "| --- | --- | --- | --- | --- |"]
    for name in stage_names():
        field = ", ".join(f"`{field} = {value}`" for field, value in fields(name).items()) if stage_below(name) else ""
        cells = [f"[{name}](docs/ladder.md#{name})", said.get(name, reason(name)), field.replace("'", '"')]
        lines.append(f"| {' | '.join([*cells, *pages.measured(name)])} |")
    paragraph = PARAGRAPH.format(
        parameters=next(iter(rows.values()))["parameters"] / 1e6,
        machine=tables.device(results),
        folder=pages.MEASURED.relative_to(pages.FOLDER),
        gain=pages.gain(rows.values()),
    )
    wrapped = textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)
    return before + HEADING + "\n".join(lines) + f"\n\n{wrapped}\n\n{after}"
