"""A text returns its characters as soon as they are certain, and ends where it should."""

import torch
from gpts import END, TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from nanoladder.infer import Prompt, Text
from nanoladder.tokenizer.encoding import build_tokenizer

BYTES = build_tokenizer("byte")


def pieces(ids, stop="", max_new_tokens=100, tokenizer=BYTES):
    """Outputs of take() after each of the ids, until the text ends."""
    text, found = Text(tokenizer, Prompt((1,)), torch.Generator(), max_new_tokens, stop), []
    for token in ids:
        if text.ended:
            break
        text.add(token)
        found.append(text.take())
    return found


def test_characters_of_several_tokens_are_returned_whole():
    assert list(filter(None, pieces("é☕x😀".encode()))) == ["é", "☕", "x", "😀"]  # each as soon as it is whole


def test_the_end_of_the_text_and_the_last_token_end_it():
    assert pieces([0, 1, END, 2], tokenizer=TOKENIZER) == ["A", "B", ""]
    assert pieces([0, 1, 2], max_new_tokens=2, tokenizer=TOKENIZER) == ["A", "B"]
    text = Text(TOKENIZER, Prompt((3, 4)), torch.Generator(), 5)
    text.add(END)
    assert text.tokens == [3, 4] and text.ended  # the end is not one of the text's tokens


@given(
    content=st.text("ab☕", max_size=12),
    stop=st.text("ab☕", max_size=4),
    size=st.integers(1, 30),
    takes=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_a_text_ends_before_the_stop_text(content, stop, size, takes):
    text, found, ids = Text(BYTES, Prompt((1,)), torch.Generator(), size, stop), "", content.encode()
    for token, take in zip(ids, takes, strict=False):
        if text.ended:
            break
        text.add(token)
        found += text.take() if take else ""  # it may be taken later
    if not text.ended:  # all that cannot begin the stop text has been returned
        found += text.take()
        assert content.startswith(found) and stop.startswith(content[len(found) :])
        return
    whole = ids[:size].decode(errors="replace")
    assert found + text.take() == (whole.partition(stop)[0] if stop else whole)
