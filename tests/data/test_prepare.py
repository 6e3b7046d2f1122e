"""Preparing a dataset is atomic and deterministic, and the files match meta.json."""

import hashlib
import io
import json
import os
import platform
import shutil
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from conftest import needs_rustbpe
from hypothesis import given
from hypothesis import strategies as st
from processes import python

from data.openwebtext import prepare as openwebtext
from data.python_stdlib import prepare as python_stdlib
from data.shakespeare import prepare as shakespeare
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as own_text
from nanoladder.data import corpus, writer
from nanoladder.data import encode as encoder
from nanoladder.data.corpus import Texts, split_documents, split_text
from nanoladder.data.encode import encode_text
from nanoladder.data.meta import FORMAT_VERSION, checksum, sample_digest
from nanoladder.data.tokenizer import (
    EVERY_CHARACTER,
    load_tokenizer,
    make_encoding,
)
from nanoladder.data.writer import PrepareParser, write_corpus
from nanoladder.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ["the cat sat on the mat\n", "the hat and the bat, 1234 naïve cafés\n\n", "that is that"]
VAL = ["a mat on a cat\n", "the end"]


def read_meta(folder):
    return json.loads((folder / "meta.json").read_text())


def read_ids(folder, split):
    return np.fromfile(folder / f"{split}.bin", read_meta(folder)["dtype"]).tolist()


def read_offsets(folder, split):
    return np.fromfile(folder / f"{split}.idx", "<u8").tolist()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_whole(folder):
    """Asserts that the folder holds the files that meta.json describes, and no others."""
    meta = read_meta(folder)
    assert all(sample_digest(folder / name) == digest for name, digest in meta["digests"].items())
    assert load_tokenizer(folder).n_vocab == meta["vocab_size"]
    assert {path.name for path in folder.iterdir()} == {"meta.json", *meta["digests"]}
    assert meta["checksum"] == checksum(meta)


def write_dataset(folder, train, val, *args, **kwargs):
    return write_corpus(folder, Texts(train, val), *args, **kwargs)


def refusal(function, *args, **kwargs):
    """The message of the BadInput that the call raises, one line."""
    with pytest.raises(BadInput) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- the writer


@pytest.mark.parametrize(
    "tokenizer, after", [pytest.param("bpe:270", "<|endoftext|>", marks=needs_rustbpe), ("char", ""), ("byte", "")]
)
def test_a_stream_decodes_to_the_texts(tokenizer, after, tmp_path):
    meta = write_dataset(tmp_path, TRAIN, VAL, tokenizer, {"python_version": "3.x"})
    assert meta == read_meta(tmp_path)
    assert_whole(tmp_path)
    encoding = load_tokenizer(tmp_path)
    for split, texts in (("train", TRAIN), ("val", VAL)):
        ids = read_ids(tmp_path, split)
        assert encoding.decode(ids) == "".join(text + after for text in texts)
        assert meta["tokens"][split] == len(ids)
        assert meta["bytes"][split] == len("".join(texts).encode())
    expected = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer,
        "vocab_size": encoding.n_vocab,
        "dtype": "uint16",
        "documents": False,
        "python_version": "3.x",
    }
    assert expected.items() <= meta.items()
    assert set(meta["digests"]) == {"train.bin", "val.bin", "tokenizer.json", "tokenizer.tiktoken"}


@pytest.mark.parametrize(
    "tokenizer, mark", [pytest.param("bpe:260", "<|endoftext|>", marks=needs_rustbpe), ("char", "\n"), ("byte", "\n")]
)
def test_documents_lie_where_the_index_says(tokenizer, mark, tmp_path):
    names = ["emma", "zoë", "olivia"], ["ava", "noah"]
    meta = write_dataset(tmp_path, *names, tokenizer, documents=True)
    assert_whole(tmp_path)
    assert meta["documents"] is True
    assert {"train.bin", "train.idx", "val.bin", "val.idx"} < set(meta["digests"])
    encoding = load_tokenizer(tmp_path)
    for split, texts in zip(("train", "val"), names, strict=True):
        ids, offsets = read_ids(tmp_path, split), read_offsets(tmp_path, split)
        assert offsets[0] == 0 and offsets[-1] == len(ids) == meta["tokens"][split]
        assert len(offsets) == len(texts) + 1
        for i, name in enumerate(texts):
            assert encoding.decode(ids[offsets[i] : offsets[i + 1]]) == mark + name + mark
        assert meta["bytes"][split] == len("".join(texts).encode())


@pytest.mark.parametrize("n_vocab, dtype", [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(n_vocab, dtype, tmp_path, monkeypatch):
    tokens = [i.to_bytes(1) for i in range(256)] + [i.to_bytes(3) for i in range(n_vocab - 256)]
    tokens[-1] = "€".encode()
    monkeypatch.setattr(writer, "build_tokenizer", lambda *_: make_encoding("big", EVERY_CHARACTER, tokens))
    write_dataset(tmp_path, ["a€"], ["€a"], "byte")
    assert read_meta(tmp_path)["dtype"] == dtype
    assert read_ids(tmp_path, "train") == [ord("a"), n_vocab - 1]
    assert (tmp_path / "train.bin").stat().st_size == 2 * np.dtype(dtype).itemsize


@needs_rustbpe
def test_bpe_learns_nothing_from_val(tmp_path):
    write_dataset(tmp_path / "one", TRAIN, ["zzzz zzzz zzzz zzzz"], "bpe:270")
    write_dataset(tmp_path / "two", TRAIN, VAL, "bpe:270")
    for name in ("tokenizer.tiktoken", "train.bin"):
        assert contents(tmp_path / "one")[name] == contents(tmp_path / "two")[name]


def test_char_knows_the_characters_of_val(tmp_path):
    write_dataset(tmp_path, ["ab"], ["xyz"], "char")
    assert load_tokenizer(tmp_path).n_vocab == 5


def test_a_document_in_blocks_has_its_separators_at_its_ends(monkeypatch, tmp_path):
    write_dataset(tmp_path / "whole", TRAIN, VAL, "byte", documents=True)
    monkeypatch.setattr(corpus, "BLOCK", 5)
    write_dataset(tmp_path / "blocks", TRAIN, VAL, "byte", documents=True)
    assert contents(tmp_path / "blocks") == contents(tmp_path / "whole")


def test_an_empty_split_is_refused(tmp_path):
    assert "train" in refusal(write_dataset, tmp_path, [""], VAL, "byte")
    assert "val" in refusal(write_dataset, tmp_path, TRAIN, [], "byte")
    assert "val" in refusal(write_dataset, tmp_path, ["hi"], ["!"], "byte")  # a token, and none to predict
    assert contents(tmp_path) == {}


# -- all or nothing


@pytest.mark.parametrize("kept", [".", "new"])
def test_a_failure_leaves_no_folder_that_was_not_there(kept, tmp_path):
    (tmp_path / kept).mkdir(parents=True, exist_ok=True)
    old = set(tmp_path.rglob("*"))
    assert "too little text for val" in refusal(write_corpus, tmp_path / "new", Texts(["two"], [""]), "byte")
    assert set(tmp_path.rglob("*")) == old


def test_a_dataset_replaces_no_run_s_tokenizer(trained, tmp_path):
    shutil.copytree(trained.out_dir, tmp_path / "run")
    before = contents(tmp_path / "run")
    assert "holds a run" in refusal(write_dataset, tmp_path / "run", TRAIN, VAL, "byte")
    assert contents(tmp_path / "run") == before


@needs_rustbpe
def test_a_failure_while_encoding_leaves_the_old_dataset(tmp_path, monkeypatch):
    write_dataset(tmp_path, TRAIN, VAL, "byte")
    old = contents(tmp_path)

    def encode_until_val(encoding, dtype, text):
        if text == VAL[1]:
            raise OSError(28, "No space left on device")
        return encode_text(encoding, dtype, text)

    monkeypatch.setattr(encoder, "BLOCK", 10)
    monkeypatch.setattr(encoder, "encode_text", encode_until_val)
    assert "No space left" in refusal(write_dataset, tmp_path, TRAIN, VAL, "bpe:270")
    assert contents(tmp_path) == old


@pytest.mark.parametrize("failing", range(10))
def test_a_failure_while_replacing_never_mixes_two_datasets(failing, tmp_path, monkeypatch):
    write_dataset(tmp_path, TRAIN, VAL, "byte", documents=True)
    old, calls, replace = contents(tmp_path), [], os.replace

    def replace_until(source, target):
        calls.append(target)
        if len(calls) > failing:
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_until)
    try:
        write_dataset(tmp_path, ["new text"], ["more"], "char")
        assert failing >= len(calls) and read_meta(tmp_path)["tokenizer"] == "char"
    except BadInput:
        assert contents(tmp_path) == old or not (tmp_path / "meta.json").exists()
    if (tmp_path / "meta.json").exists():
        assert_whole(tmp_path)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


# -- splits


@given(st.lists(st.text(), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_documents_are_split_in_order_and_reproducibly(documents, val_fraction):
    train, val = split_documents(documents, val_fraction)
    assert (train, val) == split_documents(documents, val_fraction)
    assert sorted(train + val) == sorted(documents)
    assert len(val) == min(max(1, round(len(documents) * val_fraction)), len(documents) - 1)
    rest = iter(documents)
    assert all(document in rest for document in train)  # the order given


def test_equal_keys_stay_together():
    documents = [str(i) for i in range(100)]
    keys = [f"group {i % 10}" for i in range(100)]
    _, val = split_documents(documents, 0.1, keys)
    assert len({int(document) % 10 for document in val}) == 1


@given(st.text(min_size=1), st.floats(0.01, 0.99))
def test_a_text_is_split_at_its_end(text, val_fraction):
    (train,), (val,) = split_text(text, val_fraction)
    assert train + val == text and len(train) == int(len(text) * (1 - val_fraction))


# -- the datasets


def test_another_tokenizer_goes_beside_the_default():
    parser = PrepareParser("", tokenizer="bpe:4096")
    script = "/repo/data/x/prepare.py"
    for argv, folder in [
        ([], "/repo/data/x"),
        (["--tokenizer=bpe:4096"], "/repo/data/x"),
        (["--tokenizer=byte"], "/repo/data/x_byte"),
        (["--tokenizer", "bpe:8192"], "/repo/data/x_bpe8192"),
        (["--tokenizer=byte", "--out_dir=elsewhere"], "elsewhere"),
    ]:
        assert parser.out_dir(parser.parse_args(argv), script) == Path(folder)


@pytest.mark.slow
@needs_rustbpe
def test_python_stdlib_end_to_end_from_any_folder(tmp_path):
    script = ROOT / "data" / "python_stdlib" / "prepare.py"
    done = python(script, f"--out_dir={tmp_path / 'one'}", cwd=tmp_path)
    assert len(done.stdout.splitlines()) == 1 and "--dataset=" in done.stdout and done.stderr == ""
    assert_whole(tmp_path / "one")
    meta = read_meta(tmp_path / "one")
    assert meta["python_version"] == platform.python_version()
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bpe:4096", 4096)
    n_bytes = meta["bytes"]["train"] + meta["bytes"]["val"]
    assert 7e6 < n_bytes < 20e6
    assert 0.05 < meta["bytes"]["val"] / n_bytes < 0.15
    train = load_tokenizer(tmp_path / "one").decode(read_ids(tmp_path / "one", "train"))
    assert train.count("<|endoftext|>") == meta["files"]["train"]

    python_stdlib.main(["--tokenizer=bpe:4096", f"--out_dir={tmp_path / 'two'}"])
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_python_stdlib_reads_sources_in_utf8_without_tests(tmp_path):
    left_out = ["test/t.py", "a/tests/t.py", "site-packages/p.py", "_sysconfigdata_x.py", "notes.txt"]
    for name in ["b.py", "a/x.py", *left_out]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    assert python_stdlib.read_sources(tmp_path) == {"a/x.py": "# a/x.py", "b.py": "# b.py"}


@pytest.fixture
def folder(tmp_path):
    """Three text files, one of them in a hidden folder, and two files that are not text."""
    folder = tmp_path / "input"
    (folder / "below" / ".git").mkdir(parents=True)
    (folder / "one.txt").write_text("first line\r\n\nsecond line\n", newline="")
    (folder / "below" / "two.md").write_text("drittes Stück\n", encoding="utf-8")
    (folder / "below" / ".git" / "config").write_text("hidden")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "zeros.dat").write_bytes(bytes(10))
    return folder


def prepare_text(tmp_path, *options):
    own_text.main([*map(str, options), "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"])
    out = tmp_path / "out"
    assert_whole(out)
    return {split: load_tokenizer(out).decode(read_ids(out, split)) for split in ("train", "val")}


def test_text_takes_folders_and_says_what_it_skipped(folder, tmp_path, capsys):
    (folder / "again.txt").symlink_to("one.txt")
    splits = prepare_text(tmp_path, "--input", folder)
    assert sorted(splits.values()) == ["drittes Stück\n", "first line\r\n\nsecond line\n"]
    said = capsys.readouterr().out.splitlines()[0]
    assert said == "files read: 2, skipped because they are not text in UTF-8: 2"


@pytest.mark.parametrize(
    "options, texts",
    [
        (["--documents=lines", "--val_fraction=0.4"], ["\ndrittes Stück\n\nsecond line\n", "\nfirst line\n"]),
        (["--documents=files"], ["\ndrittes Stück\n\n", "\nfirst line\r\n\nsecond line\n\n"]),
    ],
)
def test_text_by_documents(options, texts, folder, tmp_path):
    splits = prepare_text(tmp_path, "--input", folder, *options)
    assert sorted(splits.values()) == texts and read_meta(tmp_path / "out")["documents"] is True


def test_one_text_is_split_at_its_end(folder, tmp_path):
    splits = prepare_text(tmp_path, "--input", folder / "below" / "two.md", "--val_fraction=0.3")
    assert splits == {"train": "drittes S", "val": "tück\n"}


def test_an_older_dataset_in_the_folder_read_is_not_text(folder, tmp_path):
    for _ in range(2):
        prepare_text(tmp_path, "--input", tmp_path)
        first = contents(tmp_path / "out")
    assert contents(tmp_path / "out") == first
    assert sum(read_meta(tmp_path / "out")["bytes"].values()) == 25 + 15


def test_a_file_named_twice_is_read_once(folder, tmp_path):
    prepare_text(tmp_path, "--input", folder, folder / "one.txt", folder)
    assert sum(read_meta(tmp_path / "out")["bytes"].values()) == 25 + 15


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text("To be, or not to be.\n" * 10)
    return path


@pytest.mark.parametrize("options, n_vocab", [([], 11), (["--tokenizer=byte"], 256)])
def test_shakespeare_char_from_a_copy(options, n_vocab, play, tmp_path, capsys):
    shakespeare_char.main([f"--input={play}", f"--out_dir={tmp_path / 'out'}", *options])
    assert_whole(tmp_path / "out")
    meta = read_meta(tmp_path / "out")
    assert meta["vocab_size"] == n_vocab
    assert meta["tokens"] == {"train": 189, "val": 21}


def test_shakespeare_without_network_asks_for_a_copy(tmp_path, monkeypatch):
    def fail(url, timeout):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    message = refusal(shakespeare.main, ["--tokenizer=byte", f"--out_dir={tmp_path}"])
    assert shakespeare.URL in message and "--input=FILE" in message and "no network" in message
    assert contents(tmp_path) == {}


def test_shakespeare_refuses_another_text_than_expected(play, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(play.read_bytes()))
    options = ["--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"]
    assert "--input=FILE" in refusal(shakespeare.main, options)
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(play.read_bytes()).hexdigest())
    shakespeare.main(options)
    assert_whole(tmp_path / "out")


# -- the command line


@pytest.mark.parametrize(
    "dataset, options, fragment",
    [
        (python_stdlib, ["--tokenizer=bpe:12"], "bpe:12"),
        (python_stdlib, ["--tokeniser=byte"], "--tokeniser=byte"),
        (own_text, [], "--input"),
        (own_text, ["--input", "no/such/file"], "no/such/file"),
        (own_text, ["--input", "x", "--val_fraction=1.5"], "val_fraction"),
        (own_text, ["--input", "x", "--val_fraction=half"], "val_fraction"),
        (own_text, ["--input", "x", "--documents=pages"], "pages"),
        (own_text, ["--input", "LATIN"], "latin.txt: not text"),
        (shakespeare_char, ["--input=no/such/file"], "no/such/file"),
        (shakespeare_char, ["--input", "EMPTY"], "the text is empty"),
        (openwebtext, ["--tokenizer=char"], "--tokenizer=char"),
        (openwebtext, ["--limit_tokens=1e9"], "expected a whole number such as"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(dataset, options, fragment, folder, tmp_path, refused):
    (tmp_path / "empty.txt").touch()
    paths = {"LATIN": folder / "latin.txt", "EMPTY": tmp_path / "empty.txt"}
    assert fragment in refused(dataset.main, f"--out_dir={tmp_path / 'out'}", *(paths.get(o, o) for o in options))
    assert not (tmp_path / "out").exists()
