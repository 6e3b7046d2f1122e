"""A folder of characters that nanoGPT prepared: its vocabulary is read, and nothing in meta.pkl is called."""

import os
import pickle

import numpy as np
import pytest
from conftest import LINE, Call, flags, tiny

import sample
import train
from nanoladder.data import open_dataset
from nanoladder.data.meta_pkl import read_tokenizer
from nanoladder.data.tokenizer import encode, load_tokenizer
from nanoladder.errors import BadInput

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
    ({"vocab_size": 1, "itos": {0: "the"}}, "not characters"),
    ({"vocab_size": 2, "itos": {0: "a", 1: "a"}}, "not characters"),
]


@pytest.mark.parametrize("meta, reason", DAMAGE)
def test_damage_is_named(meta, reason, tmp_path, refused):
    line = refused(train.main, *run(write(tmp_path / "data", meta)))
    assert reason in line and "meta.pkl" in line and "--vocab_size=N" in line
    assert not (tmp_path / "run").exists()
