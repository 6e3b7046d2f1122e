"""A task file is read completely, or refused in one line that names the broken one."""

import json

import pytest

from nanoladder.errors import BadInput
from nanoladder.evaluation.items import Item, read_items

CHOICE = {"ind": 24, "ctx": " A man. he ", "endings": ["sings.", " flies. ", "x"], "label": 2, "split": "val"}
WORD = {"text": "She opened the door, and there stood her father"}


@pytest.fixture
def write(tmp_path):
    """write(*lines) -> the path of a file of them: dicts, texts or bytes."""

    def save(*lines):
        path = tmp_path / "task.jsonl"
        texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
        path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
        return path

    return save


def test_choices(write):
    path = write(CHOICE, "", {**CHOICE, "label": "0"}, "  ", {**CHOICE, "text": "x"}, "")
    expected = ("A man. he", ["sings.", "flies.", "x"])
    assert read_items(path) == [Item(1, *expected, 2), Item(3, *expected, 0), Item(5, *expected, 2)]


def test_a_byte_order_mark_is_skipped(write):
    assert read_items(write(b"\xef\xbb\xbf" + json.dumps(CHOICE).encode())) == read_items(write(CHOICE))


def test_last_words(write):
    path = write(WORD, {"text": "“a\u2028b”\n c  d\n"}, b'{"text": "a b\\n\\nc d.\\r\\n"}\r')
    found = [("She opened the door, and there stood her", "father"), ("“a\u2028b”\n c", "d"), ("a b\n\nc", "d.")]
    assert read_items(path) == [Item(i, context, [word], 0) for i, (context, word) in enumerate(found, 1)]


@pytest.mark.parametrize(
    "first, line, fragment",
    [
        (CHOICE, "{", "Expecting"),
        (CHOICE, b'{"text": "\xff b"}', "utf-8"),
        (CHOICE, "7", "'int'"),
        (CHOICE, {**CHOICE, "ctx": " "}, "a text is empty"),
        (CHOICE, {**CHOICE, "endings": ["a"]}, "is not the number of an ending"),
        (CHOICE, {**CHOICE, "label": 3}, "label 3 is not the number of an ending"),
        (CHOICE, WORD, "no field 'ctx'"),
        (WORD, CHOICE, "no field 'text'"),
        (WORD, {"text": "word"}, "expected a line like"),
        (WORD, {"text": 7}, "expected a line like"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(first, line, fragment, write):
    with pytest.raises(BadInput) as error:
        read_items(write(first, "", line, first))
    assert "task.jsonl line 3: " in str(error.value) and fragment in str(error.value)


@pytest.mark.parametrize(
    "name, reason", [("task.jsonl", "has no items"), ("missing.jsonl", "cannot be read"), (".", "cannot be read")]
)
def test_a_file_without_items_is_refused(name, reason, write):
    with pytest.raises(BadInput, match=reason):
        read_items(write("", " ").parent / name)
