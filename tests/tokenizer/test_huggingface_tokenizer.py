"""tokenizer.json encodes as our tokenizers do, and is read back into the same ones; anything else is refused."""

import json
import sys

import pytest
from conftest import needs_rustbpe, refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoladder.errors import BadInput
from nanoladder.tokenizer.encoding import (
    END_OF_TEXT,
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    encode,
    make_encoding,
)
from nanoladder.tokenizer.huggingface import from_huggingface, to_huggingface

CORPUS = [
    "the cat sat on the mat, the hat and that.\n",
    "naïve café: 1234 + 5678 = 6912\n\n  return None\n",
    "a" * 99 + " it'ſ" * 9,
]
NAMES = ["bpe", "gpt2", "byte"]  # that encode any text
AWKWARD = [
    *" \n\t\v\x1c\x85\u00a0\u2028\u3000\u200b'ſS²٣éßﬆ\u212a😀\u200d",
    *["  ", "\r\n", "ll", "LL", "'ve", "'RE", "123", "4567", "e\u0301", "日本", "the", " the", "aaa", END_OF_TEXT],
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(AWKWARD)).map("".join)


def build(name):
    if name == "gpt2":  # its pattern, with fewer merges
        trained = build_tokenizer("bpe:300", CORPUS)
        return make_encoding(
            "gpt2", GPT2_PATTERNS[0], list(trained._mergeable_ranks), {END_OF_TEXT: trained.n_vocab - 1}
        )
    return build_tokenizer({"bpe": "bpe:300"}.get(name, name), CORPUS)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_rustbpe) for name in NAMES])
def pair(request):
    """One of our tokenizers, and its tokenizer.json as loaded by the package tokenizers."""
    from tokenizers import Tokenizer

    encoding = build(request.param)
    return encoding, Tokenizer.from_str(json.dumps(to_huggingface(encoding)))


@given(TEXTS)
@settings(max_examples=100)
@example("x  \n  y 123456 'LL 'ſ\n\n")
@example("a" * 50)
def test_any_text_has_the_same_ids(pair, text):
    ours, theirs = pair
    theirs.encode_special_tokens = True  # as ordinary text, like ours
    ids = encode(ours, text)
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids)


def ranks_and_text():
    """Tokens in any order, most of which no merges produce, and a text of the same letters."""
    tokens = st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=12)
    return st.tuples(tokens, st.text("ab", max_size=40))


@given(ranks_and_text())
@example((["ab", "aba", "baba"], "ababababa"))
def test_ranks_in_any_order_become_merges(tokens_and_text):
    from tokenizers import Tokenizer

    tokens, text = tokens_and_text
    encoding = make_encoding("odd", GPT4_PATTERN, [*(bytes([i]) for i in range(256)), *(t.encode() for t in tokens)])
    theirs = Tokenizer.from_str(json.dumps(to_huggingface(encoding)))
    assert theirs.encode(text).ids == encode(encoding, text)


# -- reading


@pytest.fixture
def write(tmp_path):
    """write(content) writes a tokenizer.json; returns its folder."""

    def write_json(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        return tmp_path

    return write_json


def same(ours, theirs):
    parts = ("_mergeable_ranks", "_special_tokens", "_pat_str")
    return all(getattr(ours, part) == getattr(theirs, part) for part in parts) and ours.n_vocab == theirs.n_vocab


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_rustbpe) for name in [*NAMES, "char"]])
def test_a_written_tokenizer_is_read_back_without_the_package(name, write, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    encoding = build(name)
    read = from_huggingface(write(to_huggingface(encoding)))
    assert same(read, encoding)
    if name == "char":
        with pytest.raises(BadInput, match="Ж"):
            encode(read, "Ж")


def test_a_tokenizer_that_hugging_face_trained(tmp_path):
    """Special tokens come first, then the bytes in another order. Also as written by transformers' save_pretrained."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Tokenizer

    theirs = ByteLevelBPETokenizer()
    theirs.train_from_iterator(CORPUS, vocab_size=310, min_frequency=1, special_tokens=["<s>", END_OF_TEXT])
    theirs.save(str(tmp_path / "tokenizer.json"))
    theirs._tokenizer.encode_special_tokens = True
    read = from_huggingface(tmp_path)
    assert read.n_vocab == 310 and read.encode_single_token(END_OF_TEXT) == 1 and read.decode([0]) == "<s>"
    model = json.loads(theirs.to_str())["model"]
    GPT2Tokenizer(vocab=model["vocab"], merges=list(map(tuple, model["merges"]))).save_pretrained(tmp_path / "gpt2")
    for encoding in (read, from_huggingface(tmp_path / "gpt2")):
        for text in [*CORPUS, "".join(AWKWARD)]:
            assert encode(encoding, text) == theirs.encode(text).ids


BYTE_LEVEL = to_huggingface(build_tokenizer("byte"))
MODEL, CUT = BYTE_LEVEL["model"], BYTE_LEVEL["pre_tokenizer"]
EOT = {"id": 256, "content": "<s>", "special": True, "lstrip": False, "rstrip": False, "single_word": False}


def template(*pieces):
    """A post_processor that puts special tokens around the text, None."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    parts = [{"SpecialToken": {"id": piece, "type_id": 0}} if piece else text for piece in pieces]
    special = {piece: {"id": piece, "ids": [256], "tokens": [piece]} for piece in pieces if piece}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def sequence(*processors):
    return {"type": "Sequence", "processors": list(processors)}


ROBERTA = {"type": "RobertaProcessing", "cls": ["<s>", 256], "sep": ["<s>", 256], "trim_offsets": True}
ROBERTA |= {"add_prefix_space": False}


@pytest.mark.parametrize(
    "processor, around",
    [
        (CUT, False),  # byte-level: moves offsets
        (template(None), False),
        (sequence(CUT, template(None)), False),
        (template("<s>", None), True),
        (template(None, "<s>"), True),
        (sequence(CUT, template("<s>", None)), True),
        (ROBERTA, True),
    ],
)
def test_a_tokenizer_that_puts_tokens_around_a_text_is_refused(processor, around, write):
    from tokenizers import Tokenizer

    content = {**BYTE_LEVEL, "added_tokens": [EOT | {"normalized": False}], "post_processor": processor}
    ids = Tokenizer.from_str(json.dumps(content)).encode("a b").ids
    assert (256 in ids) == around
    if around:
        assert "its post_processor" in refusal(from_huggingface, write(content))
    else:
        assert encode(from_huggingface(write(content)), "a b") == ids


@pytest.mark.parametrize(
    "options, named",
    [
        ({"add_bos_token": True}, "add_bos_token"),
        ({"add_prefix_space": True}, "add_prefix_space"),
        ({"added_tokens_decoder": {"256": {**EOT, "content": "the", "special": False}}}, "adds the token 'the'"),
        ([], "AttributeError"),
        ({"add_bos_token": False, "added_tokens_decoder": {"256": EOT}, "bos_token": "<s>"}, None),
    ],
)
def test_options_of_transformers_that_change_ids_are_refused(options, named, write):
    folder = write(BYTE_LEVEL)
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    if named:
        line = refusal(from_huggingface, folder)
        assert named in line and str(folder / "tokenizer.json") in line
    else:
        assert from_huggingface(folder).n_vocab == 256


def pieces(**model):
    """Entries of a tokenizer that merges."""
    return {"model": {**MODEL, **model}, "pre_tokenizer": {**CUT, "use_regex": True}}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model": {**MODEL, "type": "Unigram"}}, "Unigram"),
        ({"normalizer": {"type": "NFC"}}, "normalizer"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
        ({"model": {**MODEL, "merges": ["a b"]}}, "pre_tokenizer"),
        (pieces(vocab={**MODEL["vocab"], "ab": 256, "bc": 257}, merges=["b c", "a b"]), "merges"),
        (pieces(vocab={"a": 0}), "no token for byte 0"),
        (pieces(vocab={**MODEL["vocab"], "日": 256}), "'日'"),
        ({"model": {**MODEL, "dropout": 0.1}}, "dropout"),
        ({"added_tokens": [{**EOT, "special": False}]}, "<s>"),
        ({"added_tokens": [{**EOT, "id": 300}]}, "gaps"),
        (None, "Decode"),
    ],
)
def test_other_tokenizers_are_refused_in_one_line(changes, named, write):
    folder = write({**BYTE_LEVEL, **changes} if changes else "{")
    line = refusal(from_huggingface, folder)
    assert named in line and str(folder / "tokenizer.json") in line
