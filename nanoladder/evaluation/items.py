"""Task files: JSONL, one item per line, all items of one of two kinds.

    {"ctx": "A man sits on a roof. He", "endings": ["sings.", "flies."], "label": 0}
    {"text": "She opened the door, and there stood her father"}

A choice (HellaSwag, Zellers et al. 2019): `label` is the 0-based index of the correct ending. A last word (LAMBADA,
Paperno et al. 2016): the word to predict follows the last space of `text`. Other fields are ignored.
"""

import json
from typing import NamedTuple

from nanoladder.errors import BadInput

EXAMPLES = '{"ctx": "...", "endings": ["...", "..."], "label": 0} or {"text": "..."}'


class Item(NamedTuple):
    """A context and its endings, without the space between them. The last word of a text is its only ending."""

    line: int  # 1-based line number in the file
    context: str
    endings: list[str]
    label: int  # index of the correct ending


def read_items(path):
    """Reads a task file into a list of Items of one kind. Raises BadInput, which names the line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        where = "expected a JSONL file; docs/evaluation.md has the commands that download public ones"
        raise BadInput(f"tasks: {path} cannot be read ({error.strerror}); {where}") from None
    items, kind = [], None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = json.loads(line.decode("utf-8-sig"))
                kind = kind or (last_word if "text" in fields and "endings" not in fields else choice)
                items.append(Item(number, *kind(fields)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = f"no field {error}" if isinstance(error, KeyError) else error
                raise BadInput(f"{path} line {number}: {reason!s:.200}; expected a line like {EXAMPLES}") from None
    if not items:
        raise BadInput(f"tasks: {path} has no items; expected lines like {EXAMPLES}")
    return items


def choice(fields):
    """Returns the context, the endings and the label of a choice. Raises as the unpacking of JSON does."""
    context, endings, label = text(fields["ctx"]), fields["endings"], int(fields["label"])  # some labels are texts
    if not isinstance(endings, list) or not 0 <= label < len(endings) > 1:
        raise ValueError(f"label {label!s:.20} is not the number of an ending")
    return context, [text(ending) for ending in endings], label


def last_word(fields):
    """Returns the context, the last word as the only ending, and its label, 0. Raises as the unpacking of JSON does."""
    context, _, word = text(fields["text"]).rpartition(" ")
    if not context:
        raise ValueError("the text is a single word")
    return context.rstrip(), [word], 0


def text(value):
    """Returns the text, stripped. Raises ValueError if nothing is left, or half of a surrogate pair."""
    stripped = value.strip()
    if not stripped.encode():
        raise ValueError("a text is empty")
    return stripped
