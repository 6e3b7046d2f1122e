"""The pages name only what exists: files, sections, scripts, targets and keys; the README's figures are measured."""

import dataclasses
import re
from pathlib import Path

import pytest
from conftest import ROOT

from lab import tables
from nanoladder.config import Config, stage_files, stage_names

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PLACEHOLDERS = {"data/DATASET/prepare.py", "config/x.py", "amp.py"}  # the last is what `ladder.py show amp` prints
MEASURED = {  # the mark of a figure in the README's table, and where it comes from
    "": "results/intel-xeon-2-threads-bf16/reference/results.json",
    " †": "results/amd-epyc-2-threads-bf16/reference/results.json",
}


def without_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code(text):
    """The code in a page: fenced and indented blocks, with continued lines joined, and what stands in backticks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    rest = without_fences(text)
    indented = re.findall(r"^    .*", rest, flags=re.MULTILINE)
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return "\n".join([*fenced, *indented, *inline]).replace("\\\n", " ")


def anchors(page):
    """The names by which GitHub links to a page's sections."""
    titles = re.findall(r"^#+ (.*)", without_fences(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for link in LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page):
    commands = code(page.read_text(encoding="utf-8"))
    for script in {*re.findall(r"\bpython (\w[\w/]*\.py)", commands), *re.findall(r"\bconfig/[\w/]+\.py", commands)}:
        assert (ROOT / script).exists() or script in PLACEHOLDERS, script
    for module in re.findall(r"\bpython -m (lab[\w.]*)", commands):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"^\s*make ([\w-]+)", commands, flags=re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_given_to_train_py_exists(page):
    keys = {field.name for field in dataclasses.fields(Config)} | {"help", "key"}  # --key=value
    for words in re.findall(r"\btrain\.py(?: [^`#\n]*)?", code(page.read_text(encoding="utf-8"))):
        assert keys.issuperset(re.findall(r"--(\w+)", words)), words


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def summaries():
    """{mark: {stage: its row of the ladder}}, each row with the one before that was measured."""
    found = {}
    for mark, path in MEASURED.items():
        rows = [row for row in tables.summarize(tables.read(ROOT / path), "ladder") if "seconds" in row]
        found[mark] = {row["name"]: (before, row) for before, row in zip([None, *rows], rows, strict=False)}
    return found


def speed(before, row):
    if before is None:
        return f"{1e3 * row['seconds']:.0f} ms"
    text = tables.gain(before, row)
    return "≈ 1" if text == tables.UNCHANGED else text.split()[0]


def memory(before, row):
    if before is None:
        return f"{row['peak'] / 1e9:.3f} GB"
    ratio = before["peak"] / row["peak"]
    return "≈ 1" if abs(ratio - 1) < 0.01 else f"{ratio:.2f}×"


def test_the_readme_has_a_row_for_every_stage_with_its_field_and_what_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written = re.findall(r"^\| \[(\w+)\]\(.*?\) \| [^|]+ \| (.*?) \| (.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    measured = summaries()
    expected = []
    for stage in stage_names():
        assignment = Path(stage_files(stage)[-1]).read_text(encoding="utf-8").rpartition('"""')[2].strip()
        field = "" if stage == "naive" else f"`{assignment.partition('  #')[0]}`"
        mark = next((mark for mark, rows in measured.items() if stage in rows), None)
        cells = ("", "") if mark is None else tuple(f(*measured[mark][stage]) + mark for f in (speed, memory))
        expected.append((stage, field, *cells))
    assert written == expected
