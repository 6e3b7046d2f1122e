"""Every tokenizer inverts its encoding, is built deterministically, and refuses invalid input."""

import json
import re
import sys
from itertools import accumulate

import numpy as np
import pytest
import requests
import tiktoken.load
import tiktoken.registry
from conftest import needs_rustbpe, refusal
from hypothesis import given
from hypothesis import strategies as st

from nanoladder.prepare.encode import encode_text
from nanoladder.tokenizer.encoding import (
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    cut_runs,
    encode,
    end_of_text,
    load_tokenizer,
    make_encoding,
    save_tokenizer,
)

CORPUS = ["the cat sat on the mat, the hat and that.\n", "naïve café: 1234 + 5678 = 6912\n\n  return None\n"]
OTHER = ["zig zag zig zag zoo zoom zooms zooming, quick quack quock, which witch is which?\n"]
NAMES = [pytest.param("bpe:280", marks=needs_rustbpe), "char", "byte"]
BYTE = build_tokenizer("byte")


@pytest.fixture(scope="module")
def bpe():
    return build_tokenizer("bpe:280", CORPUS)


@pytest.fixture(scope="module")
def trainer():
    """rustbpe's own tokenizer, trained on the same corpus."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(CORPUS), vocab_size=279, pattern=GPT4_PATTERN)
    return trainer


@needs_rustbpe
@given(st.text(min_size=1))
def test_every_tokenizer_decodes_what_it_encoded(bpe, trainer, text):
    char = build_tokenizer("char", [text])
    for encoding in (bpe, BYTE, char):
        assert encoding.decode(encode(encoding, text)) == text
    assert encode(bpe, text) == trainer.encode(text)  # tiktoken cuts and merges as rustbpe was trained
    assert len(encode(char, text)) == len(text) and char.n_vocab == len(set(text))


@needs_rustbpe
@pytest.mark.parametrize("pattern", [GPT4_PATTERN, *GPT2_PATTERNS], ids=["GPT-4", "GPT-2", "GPT-2 as published"])
def test_a_million_spaces_in_a_row_are_encoded_the_same_everywhere(pattern):
    """The regular expressions of tiktoken and rustbpe fail on them."""
    text = f"x{' ' * 10**6}y"
    ranks = build_tokenizer("bpe:258", [text])._mergeable_ranks
    encoding = make_encoding("bpe", pattern, list(ranks))
    ids = encode(encoding, text)
    assert encoding.decode(ids) == text
    assert encode_text(encoding, np.uint16, text)[0].tolist() == ids


@given(st.text("a \n", max_size=60), st.integers(1, 9))
def test_only_runs_of_whitespace_are_cut_each_from_its_start(text, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoladder.tokenizer.encoding.LONGEST_RUN", longest)
        found = list(cut_runs(text))
    runs = re.finditer(r"\s+", text)
    cuts = [cut for run in runs for cut in range(run.start() + longest, run.end(), longest)]
    assert "".join(found) == text and list(accumulate(map(len, found)))[:-1] == cuts


@needs_rustbpe
def test_a_text_too_small_for_the_vocabulary_names_the_largest_that_works():
    message = refusal(build_tokenizer, "bpe:4096", CORPUS)
    largest = int(re.search(r"the largest that works is bpe:(\d+)", message)[1])
    assert build_tokenizer(f"bpe:{largest}", CORPUS).n_vocab == largest
    refusal(build_tokenizer, f"bpe:{largest + 1}", CORPUS)


def test_without_rustbpe_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    message = refusal(build_tokenizer, "bpe:280", CORPUS)
    assert "bpe:280" in message and "pip install rustbpe" in message


def test_char_names_the_characters_it_does_not_know_and_a_place():
    line = refusal(encode, build_tokenizer("char", ["abc\n"]), "ab\nabc€aπ")
    assert "'π' (U+03C0), '€' (U+20AC): not among the 4 characters" in line and r"'ab\nabc€aπ'" in line


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_tokenizer_loads_as_the_same(name, tmp_path):
    built = build_tokenizer(name, CORPUS)
    save_tokenizer(built, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer.tiktoken"]
    assert (loaded.name, loaded.n_vocab) == (name, built.n_vocab)
    assert end_of_text(loaded) == end_of_text(built)
    for text in CORPUS:
        assert encode(loaded, text) == encode(built, text)


@needs_rustbpe
def test_the_saved_ranks_are_in_tiktokens_format(bpe, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # or tiktoken would keep a copy under the path's name
    save_tokenizer(bpe, tmp_path)
    assert tiktoken.load.load_tiktoken_bpe(str(tmp_path / "tokenizer.tiktoken")) == bpe._mergeable_ranks
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    assert described["special_tokens"] == {"<|endoftext|>": 279} and described["vocab_size"] == 280
    assert described["pattern"] == GPT4_PATTERN


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def other_ranks(folder):
    ranks = (folder / "tokenizer.tiktoken").read_bytes()
    save_tokenizer(build_tokenizer("bpe:280", OTHER), folder)
    (folder / "tokenizer.tiktoken").write_bytes(ranks)


@needs_rustbpe
@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.tiktoken").unlink(),
        lambda folder: cut(folder / "tokenizer.tiktoken", 1000),
        lambda folder: cut(folder / "tokenizer.json", 40),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: replace(folder / "tokenizer.json", "279", "278"),  # the id of <|endoftext|>
        lambda folder: replace(folder / "tokenizer.json", "{1,3}", "{1,2}"),  # the pattern
        other_ranks,
    ],
)
def test_damaged_files_are_refused(bpe, damage, tmp_path):
    save_tokenizer(bpe, tmp_path)
    damage(tmp_path)
    message = refusal(load_tokenizer, tmp_path)
    assert str(tmp_path) in message and "prepare the dataset again" in message


def test_gpt2_offline_fails_in_one_line(tmp_path, monkeypatch):
    def get(url):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    message = refusal(build_tokenizer, "gpt2")
    assert "TIKTOKEN_CACHE_DIR" in message and "ConnectionError" in message
