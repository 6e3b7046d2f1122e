"""Corpora of any size: bounded memory, the same files whatever the number of threads; bad ones end in one line."""

import gzip
import json
import random
import subprocess
import sys
from argparse import ArgumentTypeError
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from data.openwebtext import prepare as openwebtext
from data.text import prepare as own_text
from nanoladder.data import corpus, encode, writer
from nanoladder.data.corpus import Texts, blocks, find_threshold, sha256_of
from nanoladder.data.encode import encoded, in_parallel
from nanoladder.data.sources import Files, Records, find_text
from nanoladder.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    load_tokenizer,
    make_encoding,
)
from nanoladder.data.writer import whole_number, write_corpus
from nanoladder.errors import BadInput

RNG = random.Random(0)
WORDS = ["the", "cat", "sat", "on a mat,", "and", "hat\nwas", "naïve", "café", "☕.", "\n\n", ""]
TEXTS = [" ".join(RNG.choices(WORDS, k=RNG.randint(1, 60))) + f" {i}" for i in range(300)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes blocks and chunks so small that the texts here have many."""
    for module in (corpus, encode):
        monkeypatch.setattr(module, "BLOCK", 100)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(function, *args, **kwargs):
    """The message of the BadInput that the call raises, one line."""
    with pytest.raises(BadInput) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_text(folder, split):
    """The text of a split."""
    meta = json.loads((folder / "meta.json").read_text())
    return load_tokenizer(folder).decode(np.fromfile(folder / f"{split}.bin", meta["dtype"]).tolist())


# -- bounded memory, and the same result whatever the number of threads


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_only_a_few_items_are_held_at_a_time(n_threads):
    taken, given_back = 0, 0

    def items():
        nonlocal taken
        for item in range(100):
            taken += 1
            assert taken - given_back <= 2 * n_threads + 1
            yield item

    for result in in_parallel(lambda item: item * item, items(), n_threads):
        assert result == given_back**2
        given_back += 1
    assert taken == given_back == 100


def test_an_error_in_a_thread_stops_the_reading():
    taken = []

    def fail(item):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        list(in_parallel(fail, (taken.append(item) or item for item in range(1000)), 2))
    assert len(taken) <= 5


@pytest.mark.parametrize("tokenizer, documents", [("byte", False), ("char", True)])
def test_the_files_do_not_depend_on_the_number_of_threads(tokenizer, documents, small_blocks, tmp_path):
    found = []
    for n_threads in (1, 2, 5):
        folder = tmp_path / str(n_threads)
        write_corpus(folder, Texts(TEXTS[:-9], TEXTS[-9:]), tokenizer, {}, documents, n_threads=n_threads)
        found.append(contents(folder))
    assert found[0] == found[1] == found[2]


def test_special_tokens_in_a_text_are_ordinary_text():
    tokens = [bytes([value]) for value in range(256)] + [b"a ", b"a c"]
    encoding = make_encoding("bpe", r"a cat|[\s\S]", tokens, {END_OF_TEXT: 258})
    texts = ["naïve <|endoftext|> a cat", "", "☕"]
    encodings = [item for _, part, _ in encoded(Texts(texts, []), None, encoding, np.dtype("<u2")) for item in part]
    assert [ids.tolist() for ids, _ in encodings] == [encoding.encode_ordinary(text) for text in texts]
    assert [n_bytes for _, n_bytes in encodings] == [len(text.encode()) for text in texts]


@given(st.integers(0, len(TEXTS)))
def test_a_corpus_goes_on_after_any_document(n_done):
    whole, place = list(Texts(TEXTS, []).documents()), n_done or None
    assert list(Texts(TEXTS, []).documents(place)) == whole[n_done:]


lines = st.lists(st.text("a. \n", max_size=9), max_size=9)


@given(lines, st.integers(1, 5), st.integers(6, 20))
def test_blocks_do_not_depend_on_the_parts_in_which_a_text_comes(parts, block, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", block)
        patch.setattr(corpus, "LONGEST_BLOCK", longest)
        found = list(blocks(parts))
        assert found == list(blocks(["".join(parts)]))
    assert "".join(found) == "".join(parts) and all(len(text) <= longest for text in found)


@given(st.text("aé1.' \n\r\t\x1c\u3000", max_size=40), st.integers(1, 4))
@pytest.mark.parametrize("pattern", [GPT4_PATTERN, *GPT2_PATTERNS])
def test_blocks_are_encoded_to_the_ids_of_the_whole_text(pattern, text, block):
    pairs = [bytes(pair) for pair in product(b"a1.' \n\r\t", repeat=2)]  # a token for each shows where the text is cut
    encoding = make_encoding("bpe", pattern, [bytes([value]) for value in range(256)] + pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", block)
        found = [encoding.encode_ordinary(part) for part in blocks([text])]
    assert [token for ids in found for token in ids] == encoding.encode_ordinary(text)


# -- which documents are val


def test_the_validation_part_of_a_large_corpus_is_every_document_whose_hash_is_low():
    digests = [(sha256_of(str(i)), 1) for i in range(20_000)]
    threshold = find_threshold(iter(digests), 0.1, head=1000)
    val = [i for i, (digest, _) in enumerate(digests) if [digest, i] < threshold]
    assert val == [i for i, (digest, _) in enumerate(digests) if int(digest, 16) < 0.1 * 2**256]
    assert 1850 < len(val) < 2150
    assert find_threshold(digests[:1500], 0.1, head=1000) == threshold  # what follows does not matter


@given(st.integers(2, 50), st.integers(0, 99), st.floats(1e-9, 0.999999))
def test_at_least_one_document_is_val(n, head, val_fraction):
    digests = [(sha256_of(str(i)), 1) for i in range(n)]
    threshold = find_threshold(iter(digests), val_fraction, head)
    assert any([digest, i] < threshold for i, (digest, _) in enumerate(digests))


# -- files


def write_lines(path, texts, compress=bytes):
    content = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(compress(content))
    return path


def write_parquet(path, texts, field="text"):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.core.pa.table({"id": list(range(len(texts))), field: texts})
    parquet.write_table(table, path, row_group_size=50)
    return path


FORMATS = {
    "jsonl": lambda path: write_lines(path, TEXTS),
    "jsonl.gz": lambda path: write_lines(path, TEXTS, gzip.compress),
    "parquet": lambda path: write_parquet(path, TEXTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_of_records_gives_the_same_files(suffix, tmp_path):
    ours = FORMATS[suffix](tmp_path / f"x.{suffix}")
    own_text.main(["--input", str(ours), "--tokenizer=byte", "--documents=lines", f"--out_dir={tmp_path / 'out'}"])
    train, val = corpus.split_documents(TEXTS, 0.1)
    write_corpus(tmp_path / "expected", Texts(train, val), "byte", documents=True)
    found, expected = contents(tmp_path / "out"), contents(tmp_path / "expected")
    meta = json.loads(found.pop("meta.json"))
    assert meta["validation"] == "the 0.1 of the documents whose SHA-256 is lowest"
    assert found.items() < expected.items()


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_compressed_text_gives_the_same_files(suffix, small_blocks, tmp_path):
    text = "\n".join(TEXTS)
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix == "txt.gz" else text.encode())
    own_text.main(["--input", str(path), "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"])
    splits = {split: read_text(tmp_path / "out", split) for split in ("train", "val")}
    assert splits["train"] + splits["val"] == text and len(splits["train"]) == int(len(text) * 0.9)


@pytest.mark.slow
def test_another_field_and_empty_records(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": " "}\n{"body": "tw\\ud83d\\ude00o"}\n')
    own_text.main(["--input", str(path), "--field=body", "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"])
    assert sorted(read_text(tmp_path / "out", split) for split in ("train", "val")) == ["one", "tw😀o"]


@pytest.mark.parametrize("documents", ["none", "lines", "files"])
def test_a_byte_order_mark_is_no_text(documents, tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffaé\nb\nc\n".encode())
    (tmp_path / "y.txt").write_bytes("\ufeffd\n".encode())
    options = ["--tokenizer=byte", f"--documents={documents}", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / "x.txt"), str(tmp_path / "y.txt"), *options])
    text = "".join(read_text(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(text.replace("\n", "")) == ["a", "b", "c", "d", "é"]


def test_bpe_learns_from_the_first_part_of_train(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(writer, "SAMPLE", 500)
    monkeypatch.setattr(writer, "build_tokenizer", lambda name, texts: seen.extend(texts) or build_tokenizer("byte"))
    write_corpus(tmp_path, Texts(TEXTS[:100], TEXTS[100:]), "bpe:300")
    n_bytes = len("".join(seen).encode())
    assert seen == TEXTS[: len(seen)] and 500 <= n_bytes < 500 + len(seen[-1].encode()) + 1


@pytest.mark.parametrize(
    "text, number", [("7", 7), ("1_000_000", 10**6), ("500M", 5 * 10**8), ("10B", 10**10), ("1.5k", 1500)]
)
def test_a_number_of_tokens(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "M", "10X", "1e9", "0.0001K", "10 B"])
def test_no_number_of_tokens(text):
    with pytest.raises(ArgumentTypeError, match="expected a whole number such as"):
        whole_number(text)


# -- bad input: one line, nothing half-written


def truncate(path, n_bytes=50):
    path.write_bytes(path.read_bytes()[:-n_bytes])


def break_line(path, number, line):
    whole = path.read_text().splitlines()
    whole[number - 1] = line
    path.write_text("\n".join(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("x.jsonl", lambda path: break_line(path, 17, '{"text": '), ["x.jsonl cannot be read"]),
        ("x.jsonl", lambda path: path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n'), ["x.jsonl cannot be read"]),
        ("x.jsonl", lambda path: break_line(path, 3, '{"body": "a"}'), ["x.jsonl", "'text'", "body", "--field"]),
        ("x.jsonl", lambda path: break_line(path, 300, "[1]"), ["x.jsonl"]),
        ("x.jsonl", lambda path: write_lines(path, TEXTS[:1]), ["a single document"]),
        ("x.jsonl", lambda path: path.write_text(""), ["x.jsonl"]),
        ("x.parquet", lambda path: write_parquet(path, TEXTS, "body"), ["x.parquet", "'text'", "body", "--field"]),
        ("x.parquet", lambda path: write_parquet(path, [*TEXTS[:60], None]), ["x.parquet", "'text'"]),
        ("x.parquet", truncate, ["x.parquet cannot be read"]),
        ("x.jsonl.gz", truncate, ["x.jsonl.gz cannot be read"]),
        ("x.jsonl.gz", lambda path: write_lines(path, TEXTS), ["x.jsonl.gz cannot be read"]),
    ],
)
def test_a_bad_corpus_is_one_line_and_the_old_dataset_stays(name, damage, words, tmp_path, capfd):
    path, out = tmp_path / name, tmp_path / "out"
    write_corpus(out, Texts(["old"], ["dataset"]), "byte")
    old = contents(out)
    FORMATS[name.partition(".")[2]](path)
    damage(path)
    line = refusal(own_text.main, ["--input", str(path), "--tokenizer=byte", f"--out_dir={out}"])
    assert all(word in line for word in words), line
    assert len(line) < 600 and contents(out) == old and capfd.readouterr().err == ""


def test_text_beside_records_is_refused(tmp_path):
    write_lines(tmp_path / "b.jsonl", ["two", "three"])
    options = ["--input", str(tmp_path), f"--out_dir={tmp_path / 'out'}"]
    assert "--documents=files" in refusal(own_text.main, [*options, "--documents=files"])
    (tmp_path / "a.txt").write_text("one")
    assert "a.txt is text" in refusal(own_text.main, options)


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("attack", [Path.unlink, truncate])
def test_a_corpus_that_vanishes_midway_is_one_line(attack, lines, small_blocks, tmp_path):
    """The second of two files changes while the first one is encoded."""
    paths = [tmp_path / name for name in ("a.txt", "b.txt.gz")]
    paths[0].write_text("\n".join(TEXTS))
    paths[1].write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    files = Files([find_text(path) for path in paths], lines=lines, val_fraction=0.5)
    documents = files.documents()

    def documents_until(place=None):
        yield next(documents)
        attack(paths[1])
        yield from documents

    files.documents = documents_until
    line = refusal(write_corpus, tmp_path / "out", files, "byte", n_threads=1)
    assert str(paths[1]) in line and contents(tmp_path / "out") == {}


# -- streams of the hub, here local files that `datasets` streams


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Arguments of load_dataset for two local files of records."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path, texts in zip(paths, (TEXTS[:200], TEXTS[200:]), strict=True):
        write_lines(path, texts)
    return {"path": "json", "data_files": [str(path) for path in paths]}


def prepare_hub(arguments, out, *options):
    options = ["--tokenizer=byte", f"--out_dir={out}", *options]
    openwebtext.prepare(options, openwebtext.__file__, "", arguments, val_fraction=0.1)


@pytest.mark.slow
def test_a_stream_gives_the_files_of_its_documents(hub, tmp_path):
    prepare_hub(hub, tmp_path / "out")
    train, val = corpus.split_documents(TEXTS, 0.1)
    assert read_text(tmp_path / "out", "train") == "".join(train)
    assert read_text(tmp_path / "out", "val") == "".join(val)


@pytest.mark.slow
def test_a_limit_ends_at_the_document_that_reaches_it(hub, tmp_path):
    n = 0
    for limit in (1000, 5000, 10**6):
        prepare_hub(hub, tmp_path / "out", f"--limit_tokens={limit}", "--val_fraction=0.3")
        counts = json.loads((tmp_path / "out" / "meta.json").read_text())["tokens"]
        before, n = n, sum(counts.values())
        longest = max(len(text.encode()) for text in TEXTS)
        assert limit <= n < limit + longest or n == len("".join(TEXTS).encode())
        assert n > before and min(counts.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("one_stream", [True, False])
def test_a_stream_goes_on_from_any_document(one_stream, hub):
    streams = [hub] if one_stream else [{**hub, "data_files": [path]} for path in hub["data_files"]]
    whole = list(Records(streams).documents())
    for n_done in (1, 199, 200, 201, len(whole) - 1):
        stream = Records(streams)
        documents = stream.documents()
        read = [next(documents) for _ in range(n_done)]
        place = json.loads(json.dumps(stream.place))
        assert read + list(Records(streams).documents(place)) == whole


@pytest.mark.slow
def test_a_stream_that_breaks_midway_is_one_line(hub, tmp_path):
    with open(hub["data_files"][1], "a") as file:
        file.write('{"text": \n')
    line = refusal(prepare_hub, hub, tmp_path / "out")
    assert "cannot be read" in line and "give the same command again" in line
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.slow
def test_no_network_is_one_line(tmp_path):
    pytest.importorskip("datasets")
    script = ROOT / "data" / "fineweb_edu" / "prepare.py"
    command = [sys.executable, script, "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=offline)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "or the network" in done.stderr
    assert not (tmp_path / "out").exists()
