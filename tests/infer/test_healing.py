"""A prompt is continued as its text: from any byte at which a token may begin that crosses the prompt's end."""

import sys

import pytest
import torch
from conftest import LINE
from gpts import random_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoladder.infer import CachedGPT, Prompt, Sampling, Text, generate, heal
from nanoladder.infer.generate import draw
from nanoladder.tokenizer.encoding import (
    END_OF_TEXT,
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    encode,
    make_encoding,
)

MERGED = ["ab", " a", " ab", "aba", "bab", "  ", "   ", "\n\n", "\n ", "☕☕", "aé"]
BYTES = [bytes([byte]) for byte in sorted(set("ab0 \né☕".encode()))]
TOKENS = [*BYTES, "éa".encode()[1:], "☕".encode()[:2], "☕".encode(), "é".encode(), *map(str.encode, MERGED)]
END = len(TOKENS)
GPT2, GPT4 = (
    make_encoding("small", pattern, TOKENS, {END_OF_TEXT: END}) for pattern in (GPT2_PATTERNS[0], GPT4_PATTERN)
)
texts = st.text("ab0  \né☕", min_size=1, max_size=9)


class Counts:
    """Stands in for a CachedGPT: its probabilities are those of documents. documents: {text: number of times}."""

    n_tokens = 100

    def __init__(self, tokenizer, documents):
        self.rows = {(*tokenizer.encode_ordinary(text), END): times for text, times in documents.items()}

    def prefill(self, windows, rows):
        return torch.cat([self.last_logits(window, 1) for window in windows])

    def last_logits(self, window, n):
        tokens = tuple(window)[window[0] == END :]
        return torch.stack([self.after(tokens[: len(tokens) + 1 - i]) for i in range(n, 0, -1)])

    def after(self, tokens):
        logits = torch.full((END + 1,), -1e5, dtype=torch.float64)
        for row, times in self.rows.items():
            if row[: len(tokens)] == tokens:
                logits[row[len(tokens)]] = logits[row[len(tokens)]].logaddexp(
                    torch.tensor(times, dtype=torch.float64).log()
                )
        return logits


def first_choices(model, tokenizer, prompt):
    """{tokens up to the first one that is drawn: probability}, as generate() passes them to draw()."""
    text = Text(tokenizer, prompt, torch.Generator(), 1)
    found = {}

    def note(logits, sampling, generator):
        for choice, p in enumerate(logits.softmax(dim=-1).tolist()):
            way, token = (prompt, choice) if choice <= END else prompt.crossing(choice - END - 1)
            found[*way.tokens, token] = p
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[Sampling.__module__], "draw", note)
        for _ in generate(model, [text], Sampling()):
            return found


@pytest.mark.parametrize("tokenizer", [GPT2, GPT4], ids=["GPT-2", "GPT-4"])
@settings(max_examples=200)
@given(documents=st.dictionaries(texts, st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_a_continuation_has_its_probability_among_the_documents_that_begin_with_the_prompt(tokenizer, documents, data):
    document = data.draw(st.sampled_from(sorted(documents)))
    text = document[: data.draw(st.integers(1, len(document)))]
    expected = {}
    for row, times in Counts(tokenizer, documents).rows.items():
        if tokenizer.decode(row[:-1]).startswith(text):
            n = next(n for n in range(len(row)) if len(tokenizer.decode_bytes(row[: n + 1])) > len(text.encode()))
            expected[row[: n + 1]] = expected.get(row[: n + 1], 0) + times
    prompt = heal(tokenizer, text, 100)
    found = {
        tokens[tokens[0] == END :]: p
        for tokens, p in first_choices(Counts(tokenizer, documents), tokenizer, prompt).items()
    }
    assert {tokens for tokens, p in found.items() if p > 1e-9} == expected.keys()
    assert all(abs(found[tokens] - n / sum(expected.values())) < 1e-9 for tokens, n in expected.items())


@torch.no_grad()
def uncached(gpt, prompt, n, seed):
    """As generate() in a window that never moves, with whole windows and the encodings' probabilities in full."""
    generator, size, n_vocab = torch.Generator().manual_seed(seed), gpt.config.context_length, END + 1

    def after(tokens):  # log-probabilities of the next token
        return gpt.logits(torch.tensor([tokens[start:]]))[0, -1, :n_vocab].double().log_softmax(dim=-1)

    start = max(0, prompt.longest - size)
    ways = [prompt._replace(splits=range(n_vocab)), *prompt.splits]
    common = next(n for n in range(99) if len({way.tokens[: n + 1] for way in ways}) > 1 or n == len(prompt.tokens))
    choices, tokens = [], []
    for way in ways:
        p = sum(after(way.tokens[:place])[token] for place, token in enumerate(way.tokens) if place >= common)
        choices.append((p + after(way.tokens))[list(way[-1])])
        tokens += [[*way.tokens, token] for token in way[-1]]
    found = tokens[draw(torch.cat(choices), Sampling(1.3), generator)]
    while found[-1] != END and len(found) - start <= size and (n := n - 1):
        found.append(int(draw(after(found), Sampling(1.3), generator)))
    return found[: len(found) - (found[-1] == END)]


@pytest.mark.parametrize("rung", [{}, {"smear": True, "key_offset": True, "position": "rotary"}], ids=str)
def test_prompts_of_a_batch_are_healed_each_for_itself_and_are_printed_once(rung):
    prompts = ["ab ", "a", "aba\n\n", "é", "ab  ab  ab  ab  ab  ☕☕0  ", "0", "ab ", "a  "]
    gpt = random_gpt(12, **rung)
    starts = [heal(GPT2, prompt, 12) for prompt in prompts]
    expected = [uncached(gpt, start, 5, seed) for seed, start in enumerate(starts)]
    assert len(starts[4].tokens) > 12 and sum(bool(start.splits) for start in starts) == 7
    texts = [Text(GPT2, start, torch.Generator().manual_seed(i), 5) for i, start in enumerate(starts)]
    for _ in generate(CachedGPT(gpt, len(texts), 12), texts, Sampling(1.3)):
        pass
    crossed = 0
    for prompt, text, tokens in zip(prompts, texts, expected, strict=True):
        assert text.tokens[: len(tokens)] == tokens  # the reference ends where the window would move
        crossed += tuple(tokens[: len(text.prompt.tokens)]) != text.prompt.tokens
        assert GPT2.decode(text.tokens[text.tokens[0] == END :]) == prompt + text.take()
    assert crossed > 2


@pytest.mark.parametrize("name", ["char", "byte"])
def test_characters_and_bytes_have_nothing_to_heal(name):
    tokenizer = build_tokenizer(name, [LINE])
    for n in range(1, len(LINE)):
        assert heal(tokenizer, LINE[:n], 16) == Prompt(tuple(encode(tokenizer, LINE[:n])))


def test_without_a_token_or_a_context_to_begin_with_a_prompt_stays_as_it_is():
    without_end = make_encoding("small", GPT2_PATTERNS[0], TOKENS)
    assert heal(without_end, "a", 100) == heal(GPT2, "a", 1) == Prompt((TOKENS.index(b"a"),))
    assert heal(GPT2, "a", 2).tokens == (END, TOKENS.index(b"a"))
    assert heal(without_end, "ab ", 100).splits
