"""Documentation names only existing files, sections, scripts, targets and keys; the README's figures are measured."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from nanoladder.config import Config, stage_files, stage_names

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PLACEHOLDERS = {"data/DATASET/prepare.py", "config/x.py", "amp.py"}  # the last is what `ladder.py show amp` prints
MEASURED = {  # the mark of a figure in the README's table, and the folder in results/ that has it
    "": "intel-xeon-2-threads-bf16/reference",
    " †": "amd-epyc-2-threads-bf16/reference",
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


def test_every_option_given_to_profile_py_exists():
    found = subprocess.run([sys.executable, "profile.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    known = {field.name for field in dataclasses.fields(Config)} | set(re.findall(r"--(\w+)", found.stdout))
    listed = found.stdout.partition("\nmodes:\n")[2].partition("\noptions:")[0]
    modes = set(re.findall(r"^  (\w+) ", listed, flags=re.MULTILINE))
    for page in PAGES:
        for words in re.findall(r"\bprofile\.py(?: [^`#\n]*)?", code(page.read_text(encoding="utf-8"))):
            assert known.issuperset(re.findall(r"--(\w+)", words)), words
            assert modes.issuperset(re.findall(r"--mode=(\w+)", words)), words
    table = re.findall(r"^\| `(\w+)`", (ROOT / "docs/measuring.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(table) == modes


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def measured(folder):
    """{stage: (speed, memory)} of the ladder measured in a folder, as the README words them."""
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (folder / "table.md").read_text(encoding="utf-8").split("\n\n")[2].splitlines()
    ]
    part = json.loads((folder / "results.json").read_text(encoding="utf-8"))["modes"]["ladder"]
    found, before = {}, None
    for row in (dict(zip(header, cells, strict=False)) for cells in rows):
        stage = row[""]
        if not part["rows"][stage].get("examine"):  # not applicable here
            continue
        peak = part["rows"][stage]["examine"][0]["memory"]["peak"]
        if before is None:
            found[stage] = f"{row['ms/step']} ms", f"{peak / 1e9:.3f} GB"
        else:
            speed = row["against the stage before"]
            speed = "≈ 1" if speed == "no measurable change" else speed.split()[0]
            memory = "≈ 1" if abs(before / peak - 1) < 0.01 else f"{before / peak:.2f}×"
            found[stage] = speed, memory
        before = peak
    return found


def test_the_readme_has_a_row_for_every_stage_with_its_field_and_what_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written = re.findall(r"^\| \[(\w+)\]\(.*?\) \| [^|]+ \| (.*?) \| (.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    marked = {mark: measured(ROOT / "results" / folder) for mark, folder in MEASURED.items()}
    expected = []
    for stage in stage_names():
        assignment = stage_files(stage)[-1].read_text(encoding="utf-8").rpartition('"""')[2].strip()
        field = "" if stage == "naive" else f"`{assignment.partition('  #')[0]}`"
        mark = next((mark for mark, rows in marked.items() if stage in rows), None)
        cells = ("", "") if mark is None else tuple(cell + mark for cell in marked[mark][stage])
        expected.append((stage, field, *cells))
    assert written == expected
