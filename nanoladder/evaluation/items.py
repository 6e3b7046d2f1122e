"""Task files: JSONL, one item a line, all of one of two kinds.

    {"ctx": "A man sits on a roof. He", "endings": ["sings.", "flies."], "label": 0}
    {"text": "She opened the door, and there stood her father"}

A choice (HellaSwag, Zellers et al. 2019): `label` is the number of the right ending, from 0. A last word (LAMBADA,
Paperno et al. 2016): the word to predict follows the last space of `text`. Other fields are not read.
"""

import json
from pathlib import Path
from typing import NamedTuple

from nanoladder import files
from nanoladder.errors import BadInput

EXAMPLES = '{"ctx": "...", "endings": ["...", "..."], "label": 0} or {"text": "..."}'
LARGEST = 2**30  # bytes of a file


class Item(NamedTuple):
    """A context and its endings, without the space between them. The last word of a text is its only ending."""

    line: int  # in the file, from 1
    context: str
    endings: list[str]
    label: int  # number of the right ending


def read_items(path):
    """Reads a task file into a list of Items, of one kind. Raises BadInput, which names the line."""
    try:
        lines = files.read(Path(path), LARGEST).split(b"\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"tasks: {path} cannot be read ({reason}); expected a JSONL file") from None
    items, kind = [], None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = parse(line)
                kind = kind or (last_word if "text" in fields and "endings" not in fields else choice)
                items.append(Item(number, *kind(fields)))
            except ValueError as error:
                raise BadInput(f"{path} line {number}: {error}") from None
    if not items:
        raise BadInput(f"tasks: {path} has no items; expected lines like {EXAMPLES}")
    return items


def parse(line):
    """Returns the object in a line of JSON. Raises ValueError."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(error).__name__)
        raise ValueError(f"not JSON ({reason}); expected {EXAMPLES}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object; expected {EXAMPLES}")
    return fields


def choice(fields):
    """Returns the context, the endings and the label of a choice. Raises ValueError."""
    context, endings, label = (entry(fields, name) for name in ("ctx", "endings", "label"))
    if not isinstance(endings, list) or len(endings) < 2:
        raise ValueError("endings: expected a list of two texts or more")
    endings = [text(ending, f"endings[{i}]") for i, ending in enumerate(endings)]
    number = int(label) if isinstance(label, str) and label in map(str, range(len(endings))) else label  # a text
    if type(number) is not int or not 0 <= number < len(endings):
        raise ValueError(f"label={json.dumps(label):.40}: expected the number of an ending, 0 to {len(endings) - 1}")
    return text(context, "ctx"), endings, number


def last_word(fields):
    """Returns the context, the last word as the only ending, and its label, 0. Raises ValueError."""
    context, _, word = text(entry(fields, "text"), "text").rpartition(" ")
    if not context:
        raise ValueError("text: expected two words or more, with a space before the last")
    return context.rstrip(), [word], 0


def entry(fields, name):
    if name not in fields:
        raise ValueError(f"no field {name}; expected {EXAMPLES}")
    return fields[name]


def text(value, name):
    """Returns the text without space around it. Raises ValueError unless it is one, of characters, and not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}: expected a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected characters, but half of a surrogate pair is none") from None
    return value.strip()
