"""A stage's docstring is read by one grammar; docs/ladder.md and the README show what the stages are and gain."""

import re

import pytest

from lab.programs import markdown
from lab.programs.stages import describe, explanation
from nanoladder.config import stage_names
from nanoladder.config.stages import RECIPE_DIR
from nanoladder.errors import BadInput

WHOLE = '''"""It does less.

An introduction: of two
lines.

What: this.
Why: that,
in two lines.
Cost: none.
Tried: nothing.
Source:
- a, b: c: https://d.e/f
- g:
  https://h.i
"""

seed = 1
'''


@pytest.mark.slow
def test_the_ladder_is_current():
    """If not, run python ladder.py docs."""
    assert markdown.PAGE.read_text(encoding="utf-8") == markdown.page()


def test_the_tables_are_as_they_were_measured():
    """If not, run python ladder.py docs. Here because it simulates the page's statistics, which takes seconds."""
    assert markdown.RESULTS.read_text(encoding="utf-8") == markdown.results()
    assert markdown.README.read_text(encoding="utf-8") == markdown.readme()


@pytest.mark.parametrize("name", [*stage_names(), *stage_names(RECIPE_DIR)])
def test_every_docstring_explains_its_stage_and_links_its_sources(name):
    _, _, parts, sources = explanation(name)
    assert all(parts.values()) and sources and all(title and address for title, address in sources)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """planted(text) writes the file of a stage, first, that stands on a naive one, and returns its path."""
    monkeypatch.setattr("nanoladder.config.stages.STAGES_DIR", tmp_path)
    (tmp_path / "00_naive.py").write_text('"""Slow.\n\nSource:\n- a: https://b.c\n"""\n\nseed = 0\n')

    def plant(text):
        path = tmp_path / "01_first.py"
        path.write_text(text)
        return path

    return plant


def test_the_parts_of_a_docstring(planted):
    planted(WHOLE)
    parts = {"What": "this.", "Why": "that,\nin two lines.", "Cost": "none.", "Tried": "nothing."}
    sources = [("a, b: c", "https://d.e/f"), ("g", "https://h.i")]
    assert explanation("first") == ("It does less.", "An introduction: of two\nlines.", parts, sources)
    assert explanation("naive") == ("Slow.", "", {}, [("a", "https://b.c")])


@pytest.mark.parametrize(
    "old, new, line, answer",
    [
        (WHOLE, "seed = 1\n", 1, "expected a docstring that begins with one line"),
        ("Why:", "Wyh:", 7, "unknown part 'Wyh', did you mean 'Why'?"),
        ("Cost:", "What:", 9, "What comes twice or too late; expected the order Stands on, What, Why"),
        ("Cost: none.", "Cost:", 9, "Cost is empty"),
        ("Cost: none.\n", "", 10, "no Cost in the docstring"),
        ("What:", "Stands on: nave\nWhat:", 6, "Stands on 'nave': no such stage, did you mean 'naive'?"),
        ("- g:\n  https", "- g:\n  http", 13, "expected a source, - TITLE: https://ADDRESS"),
        ("- a, b", "a, b", 12, "expected a source"),
    ],
)
def test_a_malformed_docstring_is_refused_with_its_line(planted, old, new, line, answer):
    path = planted(WHOLE.replace(old, new))
    with pytest.raises(BadInput, match=re.escape(f"{path} line {line}: {answer}")):
        describe("first")
