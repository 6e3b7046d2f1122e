"""A damaged folder is refused with one line and exit code 2, before anything is written."""

import copy
import json
import os
import shutil

import numpy as np
import pytest
from conftest import flags, refusal, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from nanoladder import files
from nanoladder.data import open_dataset
from nanoladder.prepare.meta import BLOCK, BLOCKS, sample_digest

FILES = ["train.bin", "val.bin", "train.idx", "val.idx", "tokenizer.json", "tokenizer.tiktoken"]


def truncate(path, place):
    content = path.read_bytes()
    path.write_bytes(content[: place % len(content)])


def flip(path, place):
    content = bytearray(path.read_bytes())
    bit = place % (8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def replace(path, place):
    """Replaces a file by another one of the same size."""
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def remove(path, place):
    path.unlink()


def test_attacks_on_the_files_are_refused_and_nothing_is_written(dense, documents, tmp_path, refused):
    @settings(max_examples=50)
    @given(st.sampled_from(FILES), st.sampled_from([truncate, flip, replace, remove]), st.integers(0, 2**30))
    def attack(name, how, place):
        folder, out_dir = tmp_path / "attacked", tmp_path / "out"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(documents if name.endswith("idx") else dense, folder)
        how(folder / name, place)
        line = refused(train.main, *flags(dataset=folder, out_dir=out_dir))
        assert str(folder) in line and len(line) < 500 and not out_dir.exists()

    attack()


@pytest.mark.parametrize(
    "meta, given, words",
    [
        ('{"format_version": 5}', {}, ["{folder}", "meta.json", "format 5", "expected 4"]),
        ("[1]", {}, ["{folder}", "meta.json", "prepare it again"]),
        (None, {}, ["{folder}", "no meta.json", "--vocab_size"]),
        (None, {"vocab_size": 16}, ["token id 16", "--vocab_size=17"]),  # as nanoGPT leaves a folder
        ("", {"dataset": "nowhere"}, ["dataset=nowhere", "python data/text/prepare.py --input FILES"]),
        ("", {"dataset": "python_stdlb"}, ["dataset=python_stdlb: no train.bin", "did you mean 'python_stdlib'?"]),
        ("", {"dataset": "fineweb_edu_bpe512"}, ["python data/fineweb_edu/prepare.py --tokenizer=bpe:512`"]),
        ("", {"dataset": "text_bpe513"}, ["python data/text/prepare.py --input FILES --tokenizer=bpe:513`"]),
        ("", {"dataset": "text_of_nowhere_else"}, ["prepare.py --input FILES --out_dir=FOLDER`", "--tokenizer=MODEL"]),
        ("", {"vocab_size": 3}, ["vocab_size=3", "--tokenizer=MODEL"]),
        ("", {"context_length": 400}, ["context_length=400", "val.bin", "at least 401"]),
    ],
    ids=str,
)
def test_an_unusable_dataset_is_bad_input(meta, given, words, dense, tmp_path, refused):
    """meta: new content of meta.json; "": unchanged, None: deleted."""
    folder = shutil.copytree(dense, tmp_path / "data")
    if meta is None:
        (folder / "meta.json").unlink()
    elif meta:
        (folder / "meta.json").write_text(meta)
    line = refused(train.main, *flags(**{"dataset": folder, "out_dir": tmp_path / "out", **given}))
    assert all(word.format(folder=folder) in line for word in words), line
    assert not (tmp_path / "out").exists()


NOT_REGULAR = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": os.mkdir,
    "broken link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", NOT_REGULAR)
@pytest.mark.parametrize("name", [*FILES, "meta.json", "meta.pkl"])
def test_what_is_not_a_regular_file_is_refused_at_once(name, kind, dense, documents, tmp_path):
    folder = shutil.copytree(documents if name.endswith("idx") else dense, tmp_path / "data")
    if name == "meta.pkl":  # of nanoGPT
        for ours in ("meta.json", "tokenizer.json"):
            (folder / ours).unlink()
    (folder / name).unlink(missing_ok=True)
    NOT_REGULAR[kind](folder / name)
    line = refusal(open_dataset, tiny(dataset=str(folder)))
    assert str(folder) in line and name in line and len(line) < 500


@pytest.mark.parametrize("name, n_bytes", [("train.bin", -1), ("val.bin", 0), ("train.bin", 1)])
def test_token_files_of_nanogpt_without_whole_ids_or_windows_are_refused(name, n_bytes, dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "data")
    (folder / "meta.json").unlink()
    (folder / name).write_bytes((folder / name).read_bytes()[:n_bytes])
    line = refusal(open_dataset, tiny(dataset=str(folder), vocab_size=64))
    assert str(folder / name) in line and ("whole uint16 ids" if n_bytes else "holds 0 tokens") in line


@pytest.mark.parametrize(
    "change",
    [
        lambda offsets: offsets[:-1],
        lambda offsets: offsets[1:],
        lambda offsets: offsets[::-1],
        lambda offsets: np.insert(offsets, 1, offsets[1]),
        lambda offsets: np.append(offsets, 2**40),
        lambda offsets: offsets[:0],
        lambda offsets: offsets.astype("<u4")[:-1],  # not whole entries
    ],
)
def test_an_index_that_does_not_cut_the_tokens_is_refused_even_if_the_digests_hold(change, documents, tmp_path):
    folder = shutil.copytree(documents, tmp_path / "data")
    path = folder / "train.idx"
    change(np.fromfile(path, "<u8")).tofile(path)
    meta = json.loads((folder / "meta.json").read_text())
    meta["digests"]["train.idx"] = sample_digest(path)
    (folder / "meta.json").write_text(json.dumps(files.seal(meta)))
    line = refusal(open_dataset, tiny(dataset=str(folder)))
    assert str(folder) in line and "prepare the dataset again" in line


def changes(meta):
    """Yields meta with one entry, at any depth, changed to each of some values, removed, or added beside it."""
    inner = [(key, name) for key, value in meta.items() if isinstance(value, dict) for name in value]
    for *path, last in [*((key,) for key in meta), *inner]:
        for value in (None, True, False, 0, -1, 3.0, "", "uint32", [], {}, {"train.bin": 1}, "removed", "added"):
            changed = copy.deepcopy(meta)
            entries = changed[path[0]] if path else changed
            old = entries[last]
            if value == "removed":
                del entries[last]
            else:
                entries[f"{last}x" if value == "added" else last] = value
            if type(old) is not type(value) or old != value:
                yield changed


@pytest.mark.parametrize("kind", ["dense", "documents"])
def test_every_change_of_an_entry_of_meta_json_is_refused_and_another_layout_is_not(kind, request, tmp_path):
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "data")
    path, config = folder / "meta.json", tiny(dataset=str(folder))
    meta = json.loads(path.read_text())
    for changed in changes(meta):
        path.write_text(json.dumps(changed))
        line = refusal(open_dataset, config)
        assert str(path) in line and "again" in line and len(line) < 500
    path.write_text(json.dumps(dict(sorted(meta.items())), indent=4))
    assert open_dataset(config).meta == meta


@pytest.mark.parametrize(
    "entry, named",
    [
        ({"vocab_size": "64"}, "vocab_size='64', expected int"),
        ({"bytes": [9, 9]}, "bytes=[9, 9], expected dict"),
        ({"documents": 1}, "documents=1, expected bool"),
        ({"dtype": "int64"}, "dtype=int64, expected uint16 or uint32"),
    ],
    ids=str,
)
def test_an_entry_of_another_type_is_named_even_if_the_digest_holds(entry, named, dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "data")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(files.seal(meta | entry)))
    assert named in refusal(open_dataset, tiny(dataset=str(folder)))


def test_the_digest_of_a_large_file_covers_its_ends_and_any_stretch_as_long_as_the_gaps(tmp_path):
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
