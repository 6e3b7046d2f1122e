"""tokenizer.json encodes as our tokenizers do, and is read back into the same ones; anything else is refused."""

import json
import sys

import pytest
from conftest import needs_rustbpe
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoladder.data.huggingface_tokenizer import from_huggingface, last_pair, merges_of, to_huggingface
from nanoladder.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    encode,
    make_encoding,
)
from nanoladder.errors import BadInput

CORPUS = [
    "the cat sat on the mat, the hat and that.\n",
    "naïve café: 1234 + 5678 = 6912\n\n  return None\n",
    "a" * 99 + " it'ſ" * 9,
]
CHARACTERS = "".join(sorted(set("".join(CORPUS))))
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
    """A tokenizer of ours, and what the package tokenizers makes of its tokenizer.json."""
    from tokenizers import Tokenizer

    encoding = build(request.param)
    return encoding, Tokenizer.from_str(json.dumps(to_huggingface(encoding)))


@given(TEXTS)
@settings(max_examples=300)
@example("x  \n  y 123456 'LL 'ſ\n\n")
@example("a" * 50)
def test_any_text_has_the_same_ids(pair, text):
    ours, theirs = pair
    theirs.encode_special_tokens = True  # as ordinary text, as here
    ids = encode(ours, text)
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids)


@pytest.mark.slow
def test_every_character_has_the_same_ids(pair):
    """The Unicode tables of two regex engines: which characters are letters, numbers and space."""
    ours, theirs = pair
    assigned = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200)]  # private planes, nothing beyond
    texts = [
        "".join(f"{chr(code)}a {chr(code)}" for code in assigned[i : i + 999]) for i in range(0, len(assigned), 999)
    ]
    for text, encoded in zip(texts, theirs.encode_batch(texts), strict=True):
        assert encoded.ids == encode(ours, text)


@given(TEXTS)
def test_the_end_of_text_is_a_special_token(pair, text):
    ours, theirs = pair
    theirs.encode_special_tokens = False
    assert theirs.encode(text).ids == ours.encode(text, allowed_special="all")


def ranks_and_text():
    """Tokens in any order, most of which no merges make, and a text of the same letters."""
    tokens = st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=12)
    return st.tuples(tokens, st.text("ab", max_size=40))


@given(ranks_and_text())
@settings(max_examples=200)
@example((["ab", "aba", "baba"], "ababababa"))
def test_ranks_in_any_order_become_merges(tokens_and_text):
    from tokenizers import Tokenizer

    tokens, text = tokens_and_text
    encoding = make_encoding("odd", GPT4_PATTERN, [*(bytes([i]) for i in range(256)), *(t.encode() for t in tokens)])
    theirs = Tokenizer.from_str(json.dumps(to_huggingface(encoding)))
    assert theirs.encode(text).ids == encode(encoding, text)


def test_the_last_pair_of_a_token():
    ranks = {token: rank for rank, token in enumerate([b"a", b"b", b"ab", b"aba", b"abab", b"bbbb"])}
    assert last_pair(b"a", ranks) is None
    assert last_pair(b"ab", ranks) == (b"a", b"b")
    assert last_pair(b"aba", ranks) == (b"ab", b"a")
    assert last_pair(b"abab", ranks) == (b"ab", b"ab")  # not (aba, b): ab comes first, twice
    assert last_pair(b"bbbb", ranks) is None  # nothing makes bb
    assert len(merges_of(ranks)) == 3


# -- characters


@given(st.text(CHARACTERS))
def test_characters_have_the_same_ids(text):
    from tokenizers import Tokenizer

    encoding = build_tokenizer("char", CORPUS)
    theirs = Tokenizer.from_str(json.dumps(to_huggingface(encoding)))
    assert theirs.encode(text).ids == encode(encoding, text)
    assert theirs.decode(encode(encoding, text)) == text


def test_an_unknown_character_is_an_error_there_too():
    from tokenizers import Tokenizer

    encoding = build_tokenizer("char", CORPUS)
    theirs = Tokenizer.from_str(json.dumps(to_huggingface(encoding)))
    with pytest.raises(BadInput, match="Ж"):
        encode(encoding, "the Ж")
    with pytest.raises(Exception, match="WordLevel"):
        theirs.encode("the Ж")


# -- reading


@pytest.fixture
def write(tmp_path):
    """write(content): the folder of a tokenizer.json."""

    def write_json(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        return tmp_path

    return write_json


def same(ours, theirs):
    parts = ("_mergeable_ranks", "_special_tokens", "_pat_str")
    return all(getattr(ours, part) == getattr(theirs, part) for part in parts) and ours.n_vocab == theirs.n_vocab


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_rustbpe) for name in [*NAMES, "char"]])
@pytest.mark.parametrize("package", [True, False])
def test_what_is_written_is_read_back(name, package, write, monkeypatch):
    if not package:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    encoding = build(name)
    read = from_huggingface(write(to_huggingface(encoding)))
    assert same(read, encoding)
    if name == "char":
        with pytest.raises(BadInput, match="Ж"):
            encode(read, "Ж")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A GPT-2 tokenizer as Hugging Face trains it: special tokens come first, then the bytes, in another order."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("trained")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(CORPUS, vocab_size=310, min_frequency=1, special_tokens=["<s>", END_OF_TEXT])
    tokenizer.save_model(str(folder))  # vocab.json and merges.txt
    (folder / "json").mkdir()
    tokenizer.save(str(folder / "json" / "tokenizer.json"))
    return folder, tokenizer


@pytest.mark.parametrize("format", [".", "json"])
@given(text=TEXTS)
def test_a_tokenizer_that_hugging_face_trained(trained, format, text):
    folder, theirs = trained
    read = from_huggingface(folder / format)
    theirs._tokenizer.encode_special_tokens = True
    assert read.n_vocab == theirs.get_vocab_size() == 310
    assert read.encode_single_token(END_OF_TEXT) == 1 and read.decode([0]) == "<s>"
    assert encode(read, text) == theirs.encode(text).ids


@needs_rustbpe
def test_transformers_gpt2_tokenizer(tmp_path):
    """As save_pretrained writes it; the end of the text stands in its vocabulary too."""
    from transformers import GPT2Tokenizer

    encoding = build("gpt2")
    vocab = to_huggingface(encoding)["model"]["vocab"] | {END_OF_TEXT: encoding.n_vocab - 1}
    merges = [tuple(merge.split()) for merge in to_huggingface(encoding)["model"]["merges"]]
    GPT2Tokenizer(vocab=vocab, merges=merges).save_pretrained(tmp_path)
    assert same(from_huggingface(tmp_path), encoding)


def changed(content, **changes):
    """A copy of nested dicts with entries replaced: a__b=value replaces content["a"]["b"]."""
    content = json.loads(json.dumps(content))
    for path, value in changes.items():
        *parents, key = path.split("__")
        inner = content
        for parent in parents:
            inner = inner[parent]
        inner[key] = value
    return content


BYTE_LEVEL = to_huggingface(build_tokenizer("byte"))
VOCAB = BYTE_LEVEL["model"]["vocab"]
EOT = {"id": 256, "content": "<s>", "special": True, "lstrip": False, "rstrip": False, "single_word": False}


PIECES = {"model__merges": ["a b"], "pre_tokenizer__use_regex": True}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model__type": "Unigram"}, "Unigram"),
        ({"normalizer": {"type": "NFC"}}, "normalizer NFC"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
        ({"pre_tokenizer__add_prefix_space": True}, "add_prefix_space"),
        ({"model__merges": ["a b"]}, "pre_tokenizer"),
        ({"pre_tokenizer__use_regex": True, "model__merges": ["a b"]}, "merges"),
        ({"model__dropout": 0.1}, "dropout=0.1"),
        ({"model__vocab": {**VOCAB, "日": 256}}, "'日' is not spelled in bytes"),
        ({"model__vocab": {**VOCAB, "ab": 999}, **PIECES}, "gaps"),
        ({"model__vocab": {**VOCAB, "ab": 255}, **PIECES}, "gaps"),
        ({"model__vocab": {"a": 0}}, "no token for byte 0"),
        ({"added_tokens": [{**EOT, "special": False}]}, "'<s>' is found in ordinary text"),
        ({"added_tokens": [{**EOT, "id": 300}]}, "gaps"),
        ({"model": {}}, "KeyError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_other_tokenizers_are_refused_in_one_line(changes, named, write):
    folder = write(changed(BYTE_LEVEL, **changes))
    with pytest.raises(BadInput) as refusal:
        from_huggingface(folder)
    line = str(refusal.value)
    assert named in line and str(folder / "tokenizer.json") in line and "\n" not in line


@needs_rustbpe
def test_merges_in_another_order_than_the_ids_are_refused(write):
    content = to_huggingface(build("bpe"))
    merges = content["model"]["merges"]
    with pytest.raises(BadInput, match="order"):
        from_huggingface(write(changed(content, model__merges=[*merges[1:], merges[0]])))
    with pytest.raises(BadInput, match="order"):
        from_huggingface(write(changed(content, model__merges=merges[:-1])))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000], ids=["empty", "cut", "list", "null", "deep"])
def test_a_damaged_file_is_refused(text, write):
    with pytest.raises(BadInput, match="damaged"):
        from_huggingface(write(text))


def test_no_tokenizer_at_all(tmp_path):
    with pytest.raises(BadInput, match=r"expected tokenizer\.json, or vocab\.json and merges\.txt"):
        from_huggingface(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(VOCAB))
    with pytest.raises(BadInput, match=r"merges\.txt: No such file"):
        from_huggingface(tmp_path)
