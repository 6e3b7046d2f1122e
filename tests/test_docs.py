"""Documentation names only existing files, sections, scripts, targets and keys; the records' figures are measured."""

import dataclasses
import inspect
import re

import pytest
from conftest import ROOT

import ladder
from lab.measure import modes
from lab.research import records, records_report
from nanoladder.config import Config, differences
from nanoladder.config.load import help_text
from nanoladder.config.stages import LADDERS
from nanoladder.run import load_config

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "records").glob("**/*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# The last is what `ladder.py show amp` prints.
PLACEHOLDERS = {"data/DATASET/prepare.py", "config/x.py", "config/recipe/NN_NAME.py", "amp.py"}


def without_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code(text):
    """Code in a page: fenced and indented blocks, with continued lines joined, and inline code in backticks."""
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
def test_every_relative_link_resolves(page):
    for link in LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page):
    commands = code(page.read_text(encoding="utf-8"))
    for script in {
        *re.findall(r"\bpython (\w[\w/]*\.py)", commands),
        *re.findall(r"(?<![\w/])config/[\w/]+\.py", commands),
    }:
        assert (ROOT / script).exists() or script in PLACEHOLDERS, script
    for module in re.findall(r"\bpython -m (lab[\w.]*)", commands):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"^\s*make ([\w-]+)", commands, flags=re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_given_to_train_py_exists(page):
    keys = {field.name for field in dataclasses.fields(Config)} | {*LADDERS, "help", "key"}  # --key=value
    for words in re.findall(r"\btrain\.py(?: [^`#\n]*)?", code(page.read_text(encoding="utf-8"))):
        assert keys.issuperset(re.findall(r"--(\w+)", words)), words


def test_every_option_given_to_profile_py_exists(run_main):
    listed = run_main(modes.main, "--help").out.partition("\nmodes:\n")[2].partition("\noptions:")[0]
    listed_modes = set(re.findall(r"^  (\w+) ", listed, flags=re.MULTILINE))
    helps = [run_main(modes.main, f"--mode={mode}", "--help").out for mode in listed_modes]
    known = (
        {field.name for field in dataclasses.fields(Config)} | {*LADDERS} | set(re.findall(r"--(\w+)", "".join(helps)))
    )
    for page in PAGES:
        for words in re.findall(r"\bprofile\.py(?: [^`#\n]*)?", code(page.read_text(encoding="utf-8"))):
            assert known.issuperset(re.findall(r"--(\w+)", words)), words
            assert listed_modes.issuperset(re.findall(r"--mode=(\w+)", words)), words
    table = re.findall(r"^\| `(\w+)`", (ROOT / "docs/measuring.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(table) == listed_modes


def test_the_records_pages_are_up_to_date_and_the_laptop_s_config_is_a_record():
    """If the pages differ, run python ladder.py docs."""
    for race in records.races():
        assert (race.folder / "README.md").read_text(encoding="utf-8") == records_report.page(race)
        naive, loop, *_ = ([*map(str, entry.configs)] for entry in race.entries)
        of_loop = differences(load_config([*loop, "--stage=naive"]))
        assert differences(load_config(naive)) == {key: value for key, value in of_loop.items() if key != "ddp"}
    assert records_report.TRIED.read_text(encoding="utf-8") == records_report.tried()
    race = records.read_race(records.RECORDS / "naive_loss")
    entries = {each.name: differences(load_config([*map(str, each.configs)])) for each in race.entries}
    laptop = differences(load_config(["config/laptop.py"]))
    assert entries["004_key_offset"] == {key: value for key, value in laptop.items() if key != "out_dir"}
    naive = differences(load_config(["config/laptop_gpt2.py", "--stage=naive"]))
    assert entries["001_naive"] == {key: value for key, value in naive.items() if key not in ("out_dir", "ddp")}


def test_where_config_files_and_patches_are_met_they_are_said_to_be_code():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/reference.md", "records/README.md")}
    texts |= {"train.py --help": help_text(), "ladder.py check --help": inspect.getdoc(ladder.check_entry)}
    for name, text in texts.items():
        assert re.search(r"with\s+your\s+rights", text), name
