"""Damaged, swapped and forged data: refused with one line and exit code 2, before anything is written."""

import base64
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import tiktoken_ext.openai_public
from conftest import LINE, flags, tiny, write_folder, write_meta
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import train
from nanoladder.data import open_dataset
from nanoladder.data.checks import VERIFIED
from nanoladder.data.tokenizer import (
    END_OF_TEXT,
    EVERY_CHARACTER,
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    encode,
    load_tokenizer,
)
from nanoladder.data.writer import sha256

FILES = ["meta.json", "train.bin", "val.bin", "tokenizer.json", "tokenizer.tiktoken"]
INDEX = ["train.idx", "val.idx"]
BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture(scope="session")
def twins(dense, documents, tmp_path_factory):
    """Two datasets of each kind, of the same sizes: {kind: (folder, its twin)}."""
    root = tmp_path_factory.mktemp("twins")
    tokenizer = build_tokenizer("char", [LINE])
    train_ids, val_ids = (encode(tokenizer, LINE * times)[::-1] for times in (30, 8))
    write_folder(root / "dense", train_ids, val_ids, tokenizer.n_vocab, encoding=tokenizer, tokenizer="char")
    shutil.copytree(documents, root / "documents")
    for name in INDEX:  # the documents in another order
        path = root / "documents" / name
        np.cumsum([0, *np.diff(np.fromfile(path, "<u8"))[::-1]]).astype("<u8").tofile(path)
    seal(root / "documents")
    for folder in (root / "dense", root / "documents"):
        assert open_dataset(tiny(dataset=str(folder)))
    return {"dense": (dense, root / "dense"), "documents": (documents, root / "documents")}


def seal(folder, **changes):
    """Makes meta.json match the files again, as an attacker would."""
    meta = {**json.loads((folder / "meta.json").read_text()), **changes}
    digests = {path.name: sha256(path) for path in folder.iterdir() if path.name != "meta.json"}
    write_meta(folder, {**meta, "sha256": digests, **changes})


def truncate(path, place):
    content = path.read_bytes()
    path.write_bytes(content[: place % len(content)])


def flip(path, place):
    content = bytearray(path.read_bytes())
    bit = place % (8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def swap(path):
    """Swaps a file of train with that of val."""
    other = path.with_name(path.name.replace("train", "val"))
    ours, theirs = path.read_bytes(), other.read_bytes()
    assume(ours != theirs)
    path.write_bytes(theirs)
    other.write_bytes(ours)


# Ways to replace a file: {name: function of its path}.
KINDS = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "zeros without end": lambda path: path.symlink_to("/dev/zero"),
}


def put(kind, path):
    path.unlink()
    KINDS[kind](path)


places = st.integers(0, 2**30)


def attacks(kind, files):
    """Strategy of attacks: (kind of dataset, kind of attack, its arguments)."""
    names, splits = st.sampled_from(files), [name for name in files if name.startswith("train")]
    return st.one_of(
        st.tuples(st.just(kind), st.just("truncate"), names, places),
        st.tuples(st.just(kind), st.just("flip"), names, places),
        st.tuples(st.just(kind), st.just("swap"), st.sampled_from(splits)),
        st.tuples(st.just(kind), st.just("transplant"), st.lists(names, min_size=1, max_size=3, unique=True)),
        st.tuples(st.just(kind), st.just("put"), names, st.sampled_from(sorted(KINDS))),
    )


def attack_folder(folder, twin, attack):
    match attack:
        case "truncate", name, place:
            truncate(folder / name, place)
        case "flip", name, place:
            flip(folder / name, place)
        case "swap", name:
            swap(folder / name)
        case "transplant", names:
            for name in names:
                shutil.copy(twin / name, folder / name)
        case "put", name, kind:
            put(kind, folder / name)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != VERIFIED}


def test_100_attacks_on_the_files_are_refused_and_nothing_is_written(twins, tmp_path, refused):
    cases = []

    @settings(max_examples=100)
    @given(attacks("dense", FILES) | attacks("documents", FILES + INDEX))
    def try_one(case):
        kind, *attack = case
        folder, out_dir = tmp_path / "attacked", tmp_path / "out"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(twins[kind][0], folder)
        open_dataset(tiny(dataset=str(folder)))  # from now on it is remembered as whole
        assert (folder / VERIFIED).exists()
        attack_folder(folder, twins[kind][1], attack)
        assume(contents(folder) not in [contents(twin) for twin in twins[kind]])
        line = refused(train.main, *flags(dataset=folder, out_dir=out_dir))
        assert str(folder) in line and len(line) < 500 and not out_dir.exists()
        cases.append(str(case))

    try_one()
    assert len(set(cases)) == 100
    assert all(sum(what in case for case in cases) >= 5 for what in ("truncate", "flip", "transplant", "put"))


NO_COUNTS = [0, -1, 1.5, 1e30, True, None, "9", [], [9], {}, 10**30, float("nan"), float("inf")]


def offsets(*values):
    return np.array(values, np.uint64).tobytes()


NO_INDEX = [
    *(b"", offsets(0), offsets(0, 0), offsets(0, 1, 100), offsets(0, 50, 40, 100), offsets(0, 50, 99)),
    *(offsets(1, 50, 100), offsets(0, 2**63, 100), offsets(0, 2**64 - 1, 100), offsets(0, 50, 100) + b"\0"),
    offsets(0, 2**62, 2**63, 2**63 + 2**62, 100),  # the gaps, wrapping around, are all large enough
    offsets(*range(0, 101)),
]


def test_a_forged_index_is_refused(tmp_path, refused):
    folder = write_folder(tmp_path / "forged", [[1] * 50] * 2, [[1] * 50] * 2, 2)
    for index in NO_INDEX:
        (folder / "val.idx").write_bytes(index)
        seal(folder)
        assert "val.idx" in refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out")), index


def test_a_forged_id_is_refused(dense, tmp_path, refused):
    folder = shutil.copytree(dense, tmp_path / "forged")
    (folder / "val.bin").write_bytes(b"\xff\xff" + (folder / "val.bin").read_bytes()[2:])
    seal(folder)
    assert "token id 65535" in refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))


@pytest.mark.parametrize("dataset", ["x" * 999, "x/" * 499, "/dev/null", "data/loader.py/x", "~"])
def test_a_dataset_that_is_no_folder(dataset, tmp_path, refused):
    assert "no train.bin" in refused(train.main, *flags(dataset=dataset, out_dir=tmp_path / "out"))


# -- tokenizers, in a run's folder


def forge(folder, tokens, **changes):
    """Writes a tokenizer whose two files match. tokens: list of bytes in the order of their ids."""
    lines = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    description = {
        "name": "bpe:257",
        "pattern": GPT4_PATTERN,
        "special_tokens": {END_OF_TEXT: len(tokens)},
        "vocab_size": len(tokens) + 1,
        "sha256": hashlib.sha256(lines).hexdigest(),
        **changes,
    }
    (folder / "tokenizer.tiktoken").write_bytes(lines)
    (folder / "tokenizer.json").write_text(json.dumps(description))


def test_tiktokens_own_pattern_of_gpt2_is_known():
    assert tiktoken_ext.openai_public.r50k_pat_str in GPT2_PATTERNS


ranks = st.lists(st.binary(min_size=2, max_size=4), unique=True, max_size=30).map(lambda merges: BYTES + merges)


@given(tokens=ranks, pattern=st.sampled_from([GPT4_PATTERN, EVERY_CHARACTER, *GPT2_PATTERNS]), text=st.text())
def test_whatever_tokenizer_is_taken_encodes_any_text(tokens, pattern, text, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    forge(folder, tokens, pattern=pattern)
    encoding = load_tokenizer(folder)
    assert encoding.decode(encode(encoding, text)) == text
