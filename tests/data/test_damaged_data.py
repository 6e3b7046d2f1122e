"""A damaged folder is refused with one line and exit code 2, before anything is written."""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import LINE, flags, tiny, write_folder, write_meta
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import train
from nanoladder.data import open_dataset
from nanoladder.data.meta import BLOCK, BLOCKS, sample_digest
from nanoladder.data.tokenizer import build_tokenizer, encode

FILES = ["meta.json", "train.bin", "val.bin", "tokenizer.json", "tokenizer.tiktoken"]
INDEX = ["train.idx", "val.idx"]


@pytest.fixture(scope="session")
def twins(dense, documents, tmp_path_factory):
    """Two datasets of each kind, of the same sizes: {kind: (folder, its twin)}."""
    root = tmp_path_factory.mktemp("twins")
    tokenizer = build_tokenizer("char", [LINE])
    train_ids, val_ids = (encode(tokenizer, LINE * times)[::-1] for times in (30, 8))
    write_folder(root / "dense", train_ids, val_ids, tokenizer.n_vocab, encoding=tokenizer, tokenizer="char")
    splits = []
    for name in ("train", "val"):
        edges = np.fromfile(documents / f"{name}.idx", "<u8").astype(int)
        ids = np.split(np.fromfile(documents / f"{name}.bin", "<u2"), edges[1:-1])
        splits.append([document.tolist() for document in ids[::-1]])
    write_folder(root / "documents", *splits, 256, encoding=build_tokenizer("byte"))
    return {"dense": (dense, root / "dense"), "documents": (documents, root / "documents")}


def truncate(path, place):
    content = path.read_bytes()
    path.write_bytes(content[: place % len(content)])


def flip(path, place):
    content = bytearray(path.read_bytes())
    bit = place % (8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


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
places = st.integers(0, 2**30)


def attacks(kind, names):
    """Strategy of attacks: (kind of dataset, kind of attack, its arguments)."""
    names = st.sampled_from(names)
    return st.one_of(
        st.tuples(st.just(kind), st.just("truncate"), names, places),
        st.tuples(st.just(kind), st.just("flip"), names, places),
        st.tuples(st.just(kind), st.just("transplant"), names, st.none()),
        st.tuples(st.just(kind), st.just("put"), names, st.sampled_from(sorted(KINDS))),
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_100_attacks_on_the_files_are_refused_and_nothing_is_written(twins, tmp_path, refused):
    seen = set()

    @settings(max_examples=100)
    @given(attacks("dense", FILES) | attacks("documents", FILES + INDEX))
    def try_one(attack):
        (whole, twin), how, name, detail = twins[attack[0]], *attack[1:]
        folder, out_dir = tmp_path / "attacked", tmp_path / "out"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        open_dataset(tiny(dataset=str(folder)))
        if how == "transplant":
            shutil.copy(twin / name, folder / name)
        elif how == "put":
            (folder / name).unlink()
            KINDS[detail](folder / name)
        else:
            {"truncate": truncate, "flip": flip}[how](folder / name, detail)
        assume(contents(folder) != contents(whole))  # both may have the same tokenizer
        line = refused(train.main, *flags(dataset=folder, out_dir=out_dir))
        assert str(folder) in line and len(line) < 500 and not out_dir.exists()
        seen.add(how)

    try_one()
    assert seen == {"truncate", "flip", "transplant", "put"}


def rewrite_meta(folder, **changes):
    """Changes entries and corrects the checksum."""
    write_meta(folder, {**json.loads((folder / "meta.json").read_text()), **changes})


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / "train.bin").unlink(), ["no train.bin", "prepare"]),
        (lambda f: (f / "val.bin").unlink(), ["val.bin", "missing"]),
        (lambda f: truncate(f / "train.bin", -1), ["train.bin", "truncated"]),
        (lambda f: truncate(f / "val.bin", -10), ["val.bin", "truncated"]),
        (lambda f: flip(f / "val.bin", 9), ["val.bin", "is not the file that meta.json"]),
        (lambda f: (f / "val.bin").write_bytes(b""), ["val.bin", "truncated"]),
        (lambda f: rewrite_meta(f, dtype="uint32"), ["train.bin"]),
        (lambda f: rewrite_meta(f, format_version=4), ["meta.json", "format 4", "expected 3"]),
        (lambda f: flip(f / "meta.json", 999), ["meta.json", "prepare it again"]),
        (lambda f: (f / "meta.json").write_text("[1]"), ["meta.json", "prepare it again"]),
        (lambda f: (f / "meta.json").write_text("{}"), ["meta.json", "prepare it again"]),
        (lambda f: (f / "meta.json").unlink(), ["no meta.json", "--vocab_size"]),
        (lambda f: (f / "train.idx").unlink(), ["train.idx", "prepare"]),
        (lambda f: shutil.copy(f / "train.idx", f / "val.idx"), ["val.idx", "is not the file that meta.json"]),
    ],
)
def test_a_broken_folder_is_bad_input_and_nothing_is_written(damage, words, documents, tmp_path, refused):
    folder = shutil.copytree(documents, tmp_path / "broken")
    damage(folder)
    line = refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))
    assert str(folder) in line and all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "given, words",
    [
        ({"dataset": "nowhere"}, ["dataset=nowhere", "/prepare.py --input FILES --out_dir=data/nowhere`"]),
        ({"dataset": "python_stdlb"}, ["dataset=python_stdlb: no train.bin", "did you mean 'python_stdlib'?"]),
        ({"dataset": "text_bpe99999"}, ["python data/text/prepare.py --input FILES --tokenizer=bpe:99999`"]),
        ({"dataset": "python_stdlib_bpe99999"}, ["python data/python_stdlib/prepare.py --tokenizer=bpe:99999"]),
        ({"dataset": "shakespeare_bpe99999"}, ["python data/shakespeare/prepare.py --tokenizer=bpe:99999"]),
        ({"dataset": "x" * 999}, ["no train.bin"]),
        ({"dataset": "/dev/null"}, ["no train.bin"]),
        ({"vocab_size": 3}, ["vocab_size=3"]),
        ({"context_length": 100_000}, ["context_length=100000", "train.bin"]),
        ({"context_length": 400}, ["context_length=400", "val.bin", "at least 401"]),
    ],
    ids=str,
)
def test_a_dataset_that_cannot_serve_is_bad_input(given, words, dense, tmp_path, refused):
    line = refused(train.main, *flags(**{"dataset": dense, "out_dir": tmp_path / "out", **given}))
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


def test_ids_of_nanogpts_beyond_a_given_vocab_size(tmp_path, refused):
    for name in ("train", "val"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    assert open_dataset(tiny(dataset=str(tmp_path), vocab_size=100)).train.n_windows == 5
    line = refused(train.main, *flags(dataset=tmp_path, out_dir=tmp_path / "out", vocab_size=99))
    assert "token id 99" in line and "--vocab_size=100" in line


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 2**22 - 1, 2**22])
def test_a_sample_of_a_small_file_is_all_of_it(size, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    whole = sample_digest(path)
    for place in {0, 1, size // 3, size - 2, size - 1} & set(range(size)):
        path.write_bytes(bytes(place) + b"\1" + bytes(size - place - 1))
        assert sample_digest(path) != whole


def test_a_sample_of_a_large_file_has_its_ends_and_any_stretch_as_long_as_the_gaps(tmp_path):
    size = 2**25
    gap = (size - BLOCK) // (BLOCKS - 1)  # from one sampled block to the next
    path, whole = tmp_path / "file", None
    for place, length in [(0, 0), (0, 1), (size - 1, 1), (20 * gap + gap // 2, gap)]:
        with open(path, "wb") as file:
            file.truncate(size)
            file.seek(place)
            file.write(b"\1" * length)
        whole = whole or sample_digest(path)
        assert (sample_digest(path) == whole) == (length == 0)
