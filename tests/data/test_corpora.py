"""Corpora of any size: bounded memory, the same files whatever the number of workers; bad ones end in one line."""

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from data.openwebtext import prepare as openwebtext
from data.text import prepare as own_text
from nanoladder.data import corpus, encode, sources
from nanoladder.data.checks import VERIFIED
from nanoladder.data.corpus import Texts, blocks, find_threshold, sha256_of
from nanoladder.data.encode import in_parallel
from nanoladder.data.meta import token_files
from nanoladder.data.sources import Files, find_file
from nanoladder.data.tokenizer import (
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
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED}


def refusal(function, *args, **kwargs):
    """The message of the BadInput that the call raises, one line."""
    with pytest.raises(BadInput) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_text(folder, split):
    """The text of a split, of all its shards."""
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.concatenate([np.fromfile(folder / name, meta["dtype"]) for name in token_files(meta, split)])
    return load_tokenizer(folder).decode(ids.tolist())


# -- bounded memory, and the same result whatever the number of workers


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_only_a_few_items_are_held_at_a_time(workers):
    taken, given_back = 0, 0

    def items():
        nonlocal taken
        for item in range(100):
            taken += 1
            assert taken - given_back <= 2 * workers + 1
            yield item

    for result in in_parallel(lambda item: item * item, items(), workers):
        assert result == given_back**2
        given_back += 1
    assert taken == given_back == 100


def test_an_error_in_a_worker_stops_the_reading():
    taken = []

    def fail(item):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        list(in_parallel(fail, (taken.append(item) or item for item in range(1000)), 2))
    assert len(taken) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer, documents", [("byte", False), ("char", True)])
def test_the_files_do_not_depend_on_the_number_of_workers(tokenizer, documents, small_blocks, tmp_path):
    found = []
    for workers in (1, 2, 5):
        folder = tmp_path / str(workers)
        write_corpus(folder, Texts(TEXTS[:-9], TEXTS[-9:]), tokenizer, {}, documents, 4000, workers=workers)
        found.append(contents(folder))
    assert found[0] == found[1] == found[2] and "train_002.bin" in found[0]


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


@pytest.mark.parametrize("separator", ["\n", "\r\n", " "])
def test_lines_of_any_kind_and_words_are_cut_soon(separator, small_blocks):
    found = list(blocks([separator.join(["some words"] * 100)]))
    assert len(found) >= 8 and max(map(len, found)) < 120


# -- which documents are val


def test_the_validation_part_of_a_large_corpus_is_every_document_whose_hash_is_low():
    digests = [(sha256_of(str(i)), 1) for i in range(20_000)]
    threshold = find_threshold(iter(digests), 0.1, head=1000)
    val = [i for i, (digest, _) in enumerate(digests) if (digest, i) < threshold]
    assert val == [i for i, (digest, _) in enumerate(digests) if int(digest, 16) < 0.1 * 2**256]
    assert 1850 < len(val) < 2150
    assert find_threshold(digests[:1500], 0.1, head=1000) == threshold  # what follows does not matter


@pytest.mark.parametrize("val_fraction", [1e-9, 0.01, 0.5, 0.999999])
@pytest.mark.parametrize("n, head", [(2, 0), (2, 99), (50, 0), (50, 20), (50, 99)])
def test_at_least_one_document_is_val(n, head, val_fraction):
    digests = [(sha256_of(str(i)), 1) for i in range(n)]
    threshold = find_threshold(iter(digests), val_fraction, head)
    assert any((digest, i) < threshold for i, (digest, _) in enumerate(digests))


# -- files


def write_lines(path, texts, compress=bytes):
    content = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(compress(content))
    return path


def write_zst(path, content):
    pyarrow = pytest.importorskip("pyarrow")
    half = len(content) // 2
    with pyarrow.OSFile(str(path), "wb") as file:  # two frames, as pzstd and concatenation make them
        for part in (content[:half], content[half:]):
            file.write(pyarrow.compress(part, "zstd", asbytes=True))
    return path


def write_parquet(path, texts, field="text"):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.core.pa.table({"id": list(range(len(texts))), field: texts})
    parquet.write_table(table, path, row_group_size=50)
    return path


FORMATS = {
    "jsonl": lambda path: write_lines(path, TEXTS),
    "jsonl.gz": lambda path: write_lines(path, TEXTS, gzip.compress),
    "jsonl.zst": lambda path: write_zst(path, write_lines(path, TEXTS).read_bytes()),
    "parquet": lambda path: write_parquet(path, TEXTS),
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_of_records_gives_the_same_files(suffix, tmp_path):
    ours = FORMATS[suffix](tmp_path / f"x.{suffix}")
    own_text.main(["--input", str(ours), "--tokenizer=byte", "--documents=lines", f"--out_dir={tmp_path / 'out'}"])
    train, val = corpus.split_documents(TEXTS, 0.1)
    write_corpus(tmp_path / "expected", Texts(train, val), "byte", documents=True)
    found, expected = contents(tmp_path / "out"), contents(tmp_path / "expected")
    assert all(found[name] == expected[name] for name in expected if name != "meta.json")
    meta = json.loads(found["meta.json"])
    assert meta["validation"] == "the 0.1 of the documents whose SHA-256 is lowest"


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "txt.zst"])
def test_a_compressed_text_gives_the_same_files(suffix, small_blocks, tmp_path):
    text = "\n".join(TEXTS)
    path = tmp_path / f"x.{suffix}"
    if suffix == "txt.zst":
        write_zst(path, text.encode())
    else:
        path.write_bytes(gzip.compress(text.encode()) if suffix == "txt.gz" else text.encode())
    own_text.main(["--input", str(path), "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}", "--shard_tokens=10K"])
    splits = {split: read_text(tmp_path / "out", split) for split in ("train", "val")}
    assert splits["train"] + splits["val"] == text and len(splits["train"]) == int(len(text) * 0.9)


def test_another_field_and_empty_records(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": " "}\n{"body": "tw\\ud83d\\ude00o \\ud83d"}\n')
    own_text.main(["--input", str(path), "--field=body", "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"])
    assert sorted(read_text(tmp_path / "out", split) for split in ("train", "val")) == ["one", "tw😀o �"]


@pytest.mark.parametrize("documents", ["none", "lines", "files"])
def test_a_byte_order_mark_is_no_text(documents, tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffaé\nb\nc\n".encode())
    (tmp_path / "y.txt").write_bytes("\ufeffd\n".encode())
    options = ["--tokenizer=byte", f"--documents={documents}", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / "x.txt"), str(tmp_path / "y.txt"), *options])
    text = "".join(read_text(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(text.replace("\n", "")) == ["a", "b", "c", "d", "é"]


def test_texts_and_records_go_together(tmp_path):
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "b.jsonl", ["two", "three"])
    (tmp_path / "in" / "a.txt").write_text("one")
    options = ["--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / "in"), *options])
    assert sum(len(read_text(tmp_path / "out", split)) for split in ("train", "val")) == len("onetwothree")
    assert "b.jsonl" in refusal(own_text.main, ["--input", str(tmp_path / "in"), "--documents=files", *options])


def test_bpe_learns_from_the_first_part_of_train(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("nanoladder.data.writer.SAMPLE", 500)
    monkeypatch.setattr(
        "nanoladder.data.writer.build_tokenizer", lambda name, texts: seen.extend(texts) or build_tokenizer("byte")
    )
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
    options = ["--input", "x", f"--shard_tokens={text}"]
    assert "expected a whole number such as" in refusal(own_text.main, options)


# -- bad input: one line, nothing half-written


def truncate(path, n_bytes=50):
    path.write_bytes(path.read_bytes()[:-n_bytes])


def break_line(path, number, line):
    whole = path.read_text().splitlines()
    whole[number - 1] = line
    path.write_text("\n".join(whole))


# {case: (file, what is wrong with it, words that the line must hold)}
BAD = {
    "no JSON": ("x.jsonl", lambda path: break_line(path, 17, '{"text": '), ["x.jsonl, line 17: not JSON"]),
    "no UTF-8": ("x.jsonl", lambda path: path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n'), ["line 2: not JSON"]),
    "no field": ("x.jsonl", lambda path: break_line(path, 3, '{"body": "a"}'), ["line 3", "'text'", "body", "--field"]),
    "a number for a text": ("x.jsonl", lambda path: break_line(path, 3, '{"text": 7}'), ["line 3", "--field"]),
    "no record": ("x.jsonl", lambda path: break_line(path, 300, "[1]"), ["line 300", "a list"]),
    "a deep line": ("x.jsonl", lambda path: break_line(path, 9, "[" * 100_000), ["line 9: not JSON"]),
    "one record": ("x.jsonl", lambda path: write_lines(path, TEXTS[:1]), ["a single document"]),
    "nothing": ("x.jsonl", lambda path: path.write_text(""), ["the text is empty"]),
    "no column": ("x.parquet", lambda path: write_parquet(path, TEXTS, "body"), ["no column 'text'", "id, body"]),
    "a column of numbers": ("x.parquet", lambda path: write_parquet(path, [1, 2]), ["row 1", "--field"]),
    "a null": ("x.parquet", lambda path: write_parquet(path, [*TEXTS[:60], None]), ["row 61"]),
    "half a .parquet": ("x.parquet", truncate, ["x.parquet cannot be read"]),
    "half a .gz": ("x.jsonl.gz", truncate, ["x.jsonl.gz cannot be read to its end"]),
    "half a .zst": ("x.jsonl.zst", truncate, ["x.jsonl.zst cannot be read to its end"]),
    "no .gz": ("x.jsonl.gz", lambda path: write_lines(path, TEXTS), ["x.jsonl.gz cannot be read"]),
    "no .zst": ("x.jsonl.zst", lambda path: write_lines(path, TEXTS), ["x.jsonl.zst cannot be read"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_corpus_is_one_line_and_the_old_dataset_stays(case, tmp_path):
    name, damage, words = BAD[case]
    path, out = tmp_path / name, tmp_path / "out"
    write_corpus(out, Texts(["old"], ["dataset"]), "byte")
    old = contents(out)
    FORMATS[name.partition(".")[2]](path)
    damage(path)
    line = refusal(own_text.main, ["--input", str(path), "--tokenizer=byte", f"--out_dir={out}"])
    assert all(word in line for word in words), line
    assert len(line) < 500 and contents(out) == old


def test_a_file_that_becomes_shorter_is_not_called_broken(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ["a"] * 9 + ["b" * 50_000] * 9)
    documents = Files([find_file(path)]).documents(None)
    next(documents)
    os.truncate(path, path.stat().st_size - 25_000)
    assert f"{path} changed while it was read" in refusal(list, documents)


def test_an_endless_line_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "LONGEST_LINE", 2**20)
    path = write_lines(tmp_path / "x.jsonl", ["a", "b" * 2**20])
    assert "line 2: longer than 1 MB" in refusal(Files, [find_file(path)])


def change(path):
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("kind, attack", [("text", Path.unlink), ("lines", truncate), ("records", change)])
def test_a_corpus_that_vanishes_midway_is_one_line(kind, attack, small_blocks, monkeypatch, tmp_path):
    """The second of two files changes while the first one is encoded."""
    monkeypatch.setattr(sources, "PART", 100)
    paths = [tmp_path / f"{name}.{'jsonl' if kind == 'records' else 'txt'}" for name in "ab"]
    for path in paths:
        write_lines(path, TEXTS) if kind == "records" else path.write_text("\n".join(TEXTS))
    if kind == "text":
        paths = paths[1:]
    files = Files([find_file(path) for path in paths], lines=kind == "lines", cut=kind == "text")

    def pieces(position=None):
        for number, piece in enumerate(Files.pieces(files, position)):
            if number == 3:
                attack(paths[-1])
            yield piece

    monkeypatch.setattr(files, "pieces", pieces)
    line = refusal(write_corpus, tmp_path / "out", files, "byte", shard_tokens=10**6, workers=1)
    assert str(paths[-1]) in line
    assert contents(tmp_path / "out") == {}


# -- streams of the hub, here local files that `datasets` streams


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Arguments of load_dataset for two local files of records."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, texts in (("a", TEXTS[:200]), ("b", TEXTS[200:])):
        write_lines(tmp_path / f"{name}.jsonl", texts)
    return {"path": "json", "data_files": [str(tmp_path / f"{name}.jsonl") for name in "ab"]}


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
        prepare_hub(hub, tmp_path / "out", f"--limit_tokens={limit}", "--shard_tokens=700", "--val_fraction=0.3")
        counts = json.loads((tmp_path / "out" / "meta.json").read_text())["tokens"]
        before, n = n, sum(counts.values())
        longest = max(len(text.encode()) for text in TEXTS)
        assert limit <= n < limit + longest or n == len("".join(TEXTS).encode())
        assert n > before and min(counts.values()) > 0


@pytest.mark.slow
def test_a_stream_goes_on_from_any_document(hub, small_blocks):
    from nanoladder.data.hub import Hub

    whole = list(Hub(hub).pieces())
    for stop in (1, 199, 200, 201, len(whole) - 1):
        stream, read = Hub(hub), []
        for piece in stream.pieces():
            read.append(piece)
            if len(read) >= stop and stream.position():
                break
        position = json.loads(json.dumps(stream.position()))
        assert read + list(Hub(hub).pieces(position)) == whole


@pytest.mark.slow
def test_a_stream_that_vanishes_midway_is_one_line(hub, tmp_path):
    shutil.copy(hub["data_files"][0], tmp_path / "c.jsonl")
    with open(hub["data_files"][1], "a") as file:
        file.write('{"text": \n')
    line = refusal(prepare_hub, hub, tmp_path / "out", "--shard_tokens=1K")
    assert "json cannot be streamed" in line and "give the same command again" in line
    assert not (tmp_path / "out" / "meta.json").exists()
    for path in hub["data_files"]:
        (tmp_path / path).unlink()
    assert "cannot be streamed" in refusal(prepare_hub, hub, tmp_path / "out")


@pytest.mark.slow
def test_no_network_is_one_line(tmp_path):
    pytest.importorskip("datasets")
    script = ROOT / "data" / "fineweb_edu" / "prepare.py"
    command = [sys.executable, script, "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=offline)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "check the network" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_progress_ends_at_the_size_of_the_files(tmp_path):
    paths = [write_lines(tmp_path / f"{name}.jsonl.gz", TEXTS, gzip.compress) for name in "ab"]
    files, seen = Files([find_file(path) for path in paths]), []
    for _ in files.pieces():
        seen.append(files.bytes_read)
    assert sorted(seen) == seen and seen[-1] <= files.bytes_read == files.n_bytes == sum(
        p.stat().st_size for p in paths
    )


def test_char_is_refused_for_a_stream():
    assert "--tokenizer=char" in refusal(openwebtext.main, ["--tokenizer=char"])


def test_the_digest_of_a_text_file_is_that_of_its_text(tmp_path):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress("naïve\n".encode()))
    file = find_file(tmp_path / "x.txt.gz")
    assert (file.sha256, file.n_characters) == (hashlib.sha256("naïve\n".encode()).hexdigest(), 6)
