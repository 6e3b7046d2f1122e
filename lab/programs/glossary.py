"""The glossary, docs/glossary.md: its words are linked where a stage's texts use them first."""

import re
from functools import cache

from lab.programs.bundle import FOLDER

GLOSSARY = FOLDER / "docs" / "glossary.md"
LINK = re.compile(r"\[([^]]+)\]\(glossary\.md#([\w-]+)\)")  # as link() writes them


@cache
def words() -> dict[str, str]:
    """Returns {word: its meaning, Markdown}."""
    _, *sections = GLOSSARY.read_text(encoding="utf-8").split("\n## ")
    return {word: text.strip() for word, _, text in (section.partition("\n") for section in sections)}


def anchor(word: str) -> str:
    """Returns a word's anchor in docs/glossary.md, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-")


def link(texts: list[str]) -> list[str]:
    """Links the first use of each word in these texts of Markdown, which follow each other; not in code."""
    patterns = {word: re.escape(word).replace("–", "[-–]").replace(r"\ ", r"\s+") for word in words()}
    longest = sorted(patterns, key=len, reverse=True)
    uses = "|".join(f"(?P<{anchor(word).replace('-', '_')}>{patterns[word]}(?:e?s)?)" for word in longest)
    found, seen = re.compile(rf"`[^`]*`|^    .*|(?<![\w-])(?:{uses})(?![\w-])", re.MULTILINE | re.IGNORECASE), set()
    groups = {anchor(word).replace("-", "_"): anchor(word) for word in words()}

    def mark(match):
        if match.lastgroup is None or match.lastgroup in seen:
            return match[0]
        seen.add(match.lastgroup)
        return f"[{match[0]}](glossary.md#{groups[match.lastgroup]})"

    return [found.sub(mark, text) for text in texts]
