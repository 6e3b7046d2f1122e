"""A folder that nanoGPT prepared: its vocabulary and its ids are read, and nothing in meta.pkl is called."""

import os
import pickle

import numpy as np
import pytest
from conftest import LINE, Call, flags, refusal, tiny

import sample
import train
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.prepare import meta
from nanoladder.tokenizer.encoding import encode, load_tokenizer
from nanoladder.tokenizer.meta_pkl import read_tokenizer

CHARACTERS = sorted(set(LINE))
META = {
    "vocab_size": len(CHARACTERS),
    "itos": dict(enumerate(CHARACTERS)),
    "stoi": {char: token for token, char in enumerate(CHARACTERS)},
}


def write(folder, meta=META, protocol=None):
    """Writes what nanoGPT's data/shakespeare_char/prepare.py writes of such a text."""
    folder.mkdir(exist_ok=True)
    for name, times in (("train", 30), ("val", 8)):
        np.array([META["stoi"][char] for char in LINE * times], np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(meta if isinstance(meta, bytes) else pickle.dumps(meta, protocol))
    return folder


def run(folder, **keys):
    return flags(dataset=folder, out_dir=folder.parent / "run", **keys)


def test_a_run_has_the_tokenizer_and_sample_generates(tmp_path, run_main):
    folder = write(tmp_path / "data")
    train.main(run(folder))
    assert encode(load_tokenizer(tmp_path / "run"), LINE) == [META["stoi"][char] for char in LINE]
    result = run_main(sample.main, f"--out_dir={tmp_path / 'run'}", "--prompt=the cat", "--max_new_tokens=5")
    assert result.code == 0 and result.out.startswith("the cat") and len(result.out) == len("the cat") + 5 + 1
    assert open_dataset(tiny(dataset=str(folder))).meta["tokenizer"] == "char"


def test_a_larger_vocabulary_is_accepted_and_a_smaller_one_refused(tmp_path, refused):
    folder = write(tmp_path / "data")
    assert open_dataset(tiny(dataset=str(folder), vocab_size=64)).vocab_size == 64
    assert "vocab_size=3 is less than" in refused(train.main, *run(folder, vocab_size=3))


def test_an_interrupted_preparation_is_not_taken_for_nanogpt_s_data(tmp_path, refused):
    """meta.pkl may lie beside our files, which use other ids; meta.json is missing while they are replaced."""
    folder = write(tmp_path / "data")
    (folder / "tokenizer.json").write_text("{}")
    assert "has no meta.json; prepare it again" in refused(train.main, *run(folder))


# -- ids, without a meta.json


def write_ids(folder, dtype, n_ids, stated=None, n_tokens=400):
    """Writes token files with ids below n_ids, and what meta.pkl states. Returns the ids of train.bin."""
    folder.mkdir(exist_ok=True)
    ids = np.random.default_rng(0).permutation(np.linspace(0, n_ids - 1, n_tokens).round().astype(dtype))
    for name in ("train", "val"):
        ids.tofile(folder / f"{name}.bin")
    if stated:
        (folder / "meta.pkl").write_bytes(pickle.dumps(stated))
    return ids


@pytest.mark.parametrize(
    "dtype, n_ids, vocab_size, stated",
    [
        ("uint16", 50257, 50257, None),
        ("uint16", 2, 2, None),  # each id is near 0
        ("uint32", 100277, 100277, None),
        ("int32", 50257, 70000, None),
        ("uint32", 50257, 0, {"vocab_size": 50257, "dtype": "uint32"}),
        ("uint16", 50257, 50304, {"vocab_size": 50257}),
    ],
)
def test_ids_are_read_in_the_dtype_that_was_meant(dtype, n_ids, vocab_size, stated, tmp_path):
    ids = write_ids(tmp_path, dtype, n_ids, stated)
    dataset = open_dataset(tiny(dataset=str(tmp_path), vocab_size=vocab_size))
    assert dataset.train.tokens.tolist() == ids.tolist() and dataset.vocab_size == max(vocab_size, n_ids)
    assert dataset.find_tokenizer() is None


@pytest.mark.parametrize(
    "dtype, n_ids, vocab_size, stated, words",
    [
        ("uint32", 50257, 50257, None, "holds ids of 4 bytes: read as uint16, all but 1 in 2 are near 0"),
        ("uint32", 128256, 50257, None, "holds ids of 4 bytes: read as uint16"),
        ("int64", 65, 65, None, "holds ids of 8 bytes: read as uint16, all but 1 in 4 are near 0"),
        ("int64", 100277, 100277, None, "holds ids of 8 bytes: read as uint32, all but 1 in 2 are near 0"),
        ("int64", 65, 0, {"vocab_size": 65, "dtype": "uint32"}, "holds ids of 8 bytes"),
        ("uint16", 50257, 100277, None, "if they are uint16, --vocab_size is their tokenizer's"),
        ("int64", 65, 0, {"vocab_size": 65, "dtype": "int64"}, "meta.pkl states dtype='int64'; expected uint16 or"),
    ],
)
def test_ids_of_another_dtype_are_refused(dtype, n_ids, vocab_size, stated, words, tmp_path):
    write_ids(tmp_path, dtype, n_ids, stated)
    line = refusal(open_dataset, tiny(dataset=str(tmp_path), vocab_size=vocab_size))
    assert words in line and str(tmp_path) in line


def test_a_large_file_s_ids_are_checked_in_blocks(tmp_path, monkeypatch):
    """Of 64 MiB, 4 MiB are read; an id beyond the vocabulary is found at both ends, and among many."""
    read, sample_blocks = [], meta.sample_blocks

    def blocks(path, **keys):
        for block in sample_blocks(path, **keys):
            read.append(len(block))
            yield block

    monkeypatch.setattr(meta, "sample_blocks", blocks)
    monkeypatch.setattr(meta.np, "memmap", None)  # would read a page of 4 KiB for each id
    entries, n_ids = {"dtype": "uint16", "documents": False, "vocab_size": 7}, 2**25
    for place, n_wrong in [(0, 0), (0, 1), (n_ids - 1, 1), (n_ids // 3, n_ids // 255)]:
        with open(tmp_path / "train.bin", "wb") as file:
            file.truncate(2 * n_ids)
            file.seek(2 * place)
            file.write(b"\7\0" * n_wrong)
        if n_wrong:
            assert "token id 7, beyond" in refusal(meta.check_tokens, tmp_path / "train.bin", entries, 16)
        else:
            meta.check_tokens(tmp_path / "train.bin", entries, 16)
        assert sum(read) == 2**22
        read.clear()


# -- bad input


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_object_is_refused_and_not_constructed(protocol, tmp_path):
    with pytest.raises(BadInput, match=f"{os.mkdir.__module__}.mkdir"):
        read_tokenizer(write(tmp_path / "data", {**META, "more": Call(tmp_path / "made")}, protocol))
    assert not (tmp_path / "made").exists()
    encoding = read_tokenizer(write(tmp_path / "data", META, protocol))
    assert [encoding.decode_single_token_bytes(token).decode() for token in range(encoding.n_vocab)] == CHARACTERS


DAMAGE = [
    (b"some text", "UnpicklingError"),
    (pickle.dumps(META)[:-40], "meta.pkl"),
    ({"itos": {0: "a"}}, "KeyError: 'vocab_size'"),
    ({"vocab_size": 1, "itos": {0: "\ud800"}}, "UnicodeEncodeError"),
    ({"vocab_size": 2.0}, "vocab_size=2.0, expected the number of token ids"),
    ({"vocab_size": 1, "itos": {0: "the"}}, "not characters"),
    ({"vocab_size": 2, "itos": {0: "a", 1: "a"}}, "not characters"),
]


@pytest.mark.parametrize("meta, reason", DAMAGE)
def test_damage_is_named(meta, reason, tmp_path, refused):
    line = refused(train.main, *run(write(tmp_path / "data", meta)))
    assert reason in line and "meta.pkl" in line and "--vocab_size=N" in line
    assert not (tmp_path / "run").exists()
