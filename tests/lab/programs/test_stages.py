"""A stage's docstring is read by one grammar; docs/ladder.md and the README show what the stages are and gain."""

import re
import shlex

import pytest

import ladder
from lab.measure import cli
from lab.programs import glossary, markdown
from lab.programs.stages import BOTH, describe, explanation
from nanoladder.errors import BadInput
from nanoladder.run import load_config

WHOLE = '''"""It does less.

An introduction: of two
lines.

What: this.
Why: that,
in two lines.
Cost: none.
Tried: nothing.
Try: `python ladder.py`.
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


@pytest.mark.parametrize("name", BOTH)
def test_every_docstring_explains_its_stage_and_links_its_sources(name):
    _, _, parts, sources = explanation(name)
    assert all(parts.values()) and sources and all(title and address for title, address in sources)


@pytest.mark.parametrize("name", BOTH)
def test_every_stage_has_a_command_to_try_which_its_script_understands(name, capsys):
    spans = [shlex.split(" ".join(span.split())) for span in re.findall(r"`([^`]+)`", explanation(name)[2]["Try"])]
    commands = [words for words in spans if words[0] in ("python", "torchrun")]
    assert commands
    for words in commands:
        script, *rest = words[next(n for n, word in enumerate(words) if word == "-c" or word.endswith(".py")) :]
        if script == "-c":
            exec(rest[0], {})
            assert capsys.readouterr().out
        elif script == "ladder.py":
            ladder.command_line().parse_args(rest)
        else:
            load_config(cli.parse(rest)[1] if script == "profile.py" else rest)


def test_words_of_the_glossary_are_linked_where_they_come_first():
    texts = [
        "An all-reduce of\nmicro-batches; `a bucket`, a bucket.",
        "All-reduces, newton-schulz, kernels.\n\n    logits",
    ]
    first, second = glossary.link(texts)
    assert first == (
        "An [all-reduce](glossary.md#all-reduce) of\n[micro-batches](glossary.md#micro-batch); `a bucket`, a "
        "[bucket](glossary.md#bucket)."
    )
    assert second == (
        "All-reduces, [newton-schulz](glossary.md#newtonschulz), [kernels](glossary.md#kernel).\n\n    logits"
    )
    assert glossary.LINK.findall(first)[0] == ("all-reduce", "all-reduce")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """planted(text) writes the file of a stage, first, that stands on a naive one, and returns its path."""
    monkeypatch.setattr("nanoladder.config.stages.STAGES_DIR", tmp_path)
    (tmp_path / "00_naive.py").write_text('"""Slow.\n\nTry: `x`.\nSource:\n- a: https://b.c\n"""\n\nseed = 0\n')

    def plant(text):
        path = tmp_path / "01_first.py"
        path.write_text(text)
        return path

    return plant


def test_the_parts_of_a_docstring(planted):
    planted(WHOLE)
    parts = {"What": "this.", "Why": "that,\nin two lines.", "Cost": "none.", "Tried": "nothing."}
    parts["Try"] = "`python ladder.py`."
    sources = [("a, b: c", "https://d.e/f"), ("g", "https://h.i")]
    assert explanation("first") == ("It does less.", "An introduction: of two\nlines.", parts, sources)
    assert explanation("naive") == ("Slow.", "", {"Try": "`x`."}, [("a", "https://b.c")])


@pytest.mark.parametrize(
    "old, new, line, answer",
    [
        (WHOLE, "seed = 1\n", 1, "expected a docstring that begins with one line"),
        ("Why:", "Wyh:", 7, "unknown part 'Wyh', did you mean 'Why'?"),
        ("Cost:", "What:", 9, "What comes twice or too late; expected the order Stands on, What, Why"),
        ("Cost: none.", "Cost:", 9, "Cost is empty"),
        ("Cost: none.\n", "", 11, "no Cost in the docstring"),
        ("What:", "Stands on: nave\nWhat:", 6, "Stands on 'nave': no such stage, did you mean 'naive'?"),
        ("- g:\n  https", "- g:\n  http", 14, "expected a source, - TITLE: https://ADDRESS"),
        ("- a, b", "a, b", 13, "expected a source"),
    ],
)
def test_a_malformed_docstring_is_refused_with_its_line(planted, old, new, line, answer):
    path = planted(WHOLE.replace(old, new))
    with pytest.raises(BadInput, match=re.escape(f"{path} line {line}: {answer}")):
        describe("first")
