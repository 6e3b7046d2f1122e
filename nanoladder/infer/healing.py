"""Token healing: a prompt that ends within a token is continued as its text, not as its tokens.

BPE encodes "def main" as `def`, ` main`: a word's token begins with its space. The prompt "def " is `def`, ` `, and
after a lone space the model has rarely seen a letter. So the first token drawn may begin before the prompt's end.

Exactly: a continuation has the model's probability of its tokens, given that they begin like the encoding of some text
that begins with the prompt. Such a beginning is the encoding of the whole prompt, or the encoding of its text up to an
earlier byte, followed by a token that crosses the end; spaces at the end are encoded as before a letter and a digit,
too. The beginning and the token after it are one draw from their joint probabilities, to which temperature, top_k and
top_p apply. If no token can cross the end, as with characters and bytes, it is the usual draw.
"""

from bisect import bisect_right
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from tiktoken import Encoding

from nanoladder.machine import double
from nanoladder.tokenizer.encoding import encode, end_of_text


class Split(NamedTuple):
    """A prompt's text up to some byte, encoded, and the ids of the longer tokens that begin with the bytes after it."""

    tokens: tuple
    n_bytes: int  # of the prompt, after these tokens
    crossing: tuple


class Prompt(NamedTuple):
    """Token ids of a prompt, at least one, and its Splits."""

    tokens: tuple
    splits: tuple = ()

    @property
    def longest(self) -> int:
        """Number of tokens of the longest encoding, without a crossing token."""
        return max(len(split.tokens) for split in (self, *self.splits))

    def crossing(self, i):
        """Returns the Split of the i-th crossing token of all, and the token's id."""
        return [(split, token) for split in self.splits for token in split.crossing][i]


def heal(tokenizer: Encoding, text: str, size: int) -> Prompt:
    """Returns the Prompt of a text, not empty. size: context length. Raises BadInput for characters without a token.

    A text that one token may span begins a document, so that even this token has a probability; without
    `<|endoftext|>`, or in too short a context, its Prompt has no splits.
    """
    plain, first = Prompt(tuple(encode(tokenizer, text))), end_of_text(tokenizer)
    splits = find_splits(tokenizer, text, plain.tokens)
    healed = Prompt(plain.tokens, splits)
    if not n_common(healed) and first is not None:
        healed = Prompt(
            (first, *plain.tokens), tuple(split._replace(tokens=(first, *split.tokens)) for split in splits)
        )
    return healed if n_common(healed) > max(0, healed.longest - size) else plain


def find_splits(tokenizer, text, tokens):
    """Returns the Splits of a text with these tokens: every place that some longer token crosses."""
    vocabulary, content, places = tokenizer.token_byte_values(), text.encode(), {}  # the vocabulary is sorted
    for place in range(max(0, len(content) - max(map(len, vocabulary))), len(content)):
        if longer_tokens(vocabulary, content[place:]):
            places[tokens_before(tokenizer, content, tokens, place)] = place
    if text[-1].isspace() and tokenizer.name != "char":  # what follows a space may change its tokens: "\n\n" is often
        for character in "a0":  # one at the end of a text, two before a letter
            followed = tuple(encode(tokenizer, text + character))
            n, place = last_before(tokenizer, followed, len(content))
            places[followed[:n]] = place
    places.pop(tokens, None)
    splits = []
    for before, place in places.items():
        n_bytes, longer = len(content) - place, longer_tokens(vocabulary, content[place:])
        ids = map(tokenizer.encode_single_token, longer) if n_bytes else range(tokenizer.n_vocab)
        splits.append(Split(before, n_bytes, tuple(ids)))
    return tuple(split for split in splits if split.crossing)


def longer_tokens(vocabulary, rest):
    """Tokens of a sorted vocabulary that begin with these bytes and are longer."""
    end = bisect_right(vocabulary, rest, key=lambda token: token[: len(rest)])
    return vocabulary[bisect_right(vocabulary, rest) : end]


def tokens_before(tokenizer, content, tokens, place):
    """Token ids, a tuple, of the bytes before a place in a text with these tokens."""
    n, end = last_before(tokenizer, tokens, place)
    if end == place:
        return tokens[:n]
    try:
        return tuple(encode(tokenizer, content[:place].decode()))
    except UnicodeDecodeError:  # a place within a character
        return (*tokens[:n], *tokenizer._encode_single_piece(content[end:place]))


def last_before(tokenizer, tokens, place):
    """Returns the number of tokens that end up to a place, in bytes, and the place where the last of them ends."""
    ends = [*accumulate(map(len, tokenizer.decode_tokens_bytes(tokens)), initial=0)]
    n = bisect_right(ends, place) - 1
    return n, ends[n]


def n_common(prompt):
    """Number of leading tokens that all encodings of a prompt share."""
    places = zip(*(split.tokens for split in (prompt, *prompt.splits)), strict=False)
    return len([*takewhile(lambda tokens: len(set(tokens)) == 1, places)])


def crossing_logits(model, prompt, n_vocab):
    """Log-probabilities of the splits' crossing tokens, in order, relative to the prompt's own tokens.

    model: a CachedGPT, whose row 0 is overwritten. Of a prompt longer than its rows, only the last tokens count.
    """
    common, start = n_common(prompt), max(0, prompt.longest - model.n_tokens)
    log_probs = []
    for split in (prompt, *prompt.splits):
        logits = model.last_logits(split.tokens[start:], len(split.tokens) - common + 1)  # (n, V)
        logs = double(logits[:, :n_vocab]).log_softmax(dim=-1)
        before = sum(logs[place, token] for place, token in enumerate(split.tokens[common:]))
        log_probs.append(before + logs[-1, list(split.crossing)] if log_probs else before)
    return torch.cat(log_probs[1:]) - log_probs[0]
