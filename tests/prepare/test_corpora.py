"""Corpora of any size: bounded memory, the same files for any number of threads; bad ones are refused in one line."""

import gzip
import json
import os
import random
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, needs_rustbpe, refusal
from hypothesis import given
from hypothesis import strategies as st

from data.openwebtext import prepare as openwebtext
from data.text import prepare as own_text
from nanoladder.prepare import corpus, encode, sources
from nanoladder.prepare.corpus import Texts, blocks, sha256_of, split_of
from nanoladder.prepare.encode import encoded
from nanoladder.prepare.records import JsonLines, Parquet, Records, Stream
from nanoladder.prepare.sources import Files, find_text, separated
from nanoladder.prepare.writer import write_corpus
from nanoladder.tokenizer.encoding import (
    END_OF_TEXT,
    GPT2_PATTERNS,
    GPT4_PATTERN,
    build_tokenizer,
    end_of_text,
    load_tokenizer,
    make_encoding,
)

RNG = random.Random(0)
WORDS = ["the", "cat", "sat", "on a mat,", "and", "hat\nwas", "naïve", "café", "☕.", "\n\n", ""]
TEXTS = [" ".join(RNG.choices(WORDS, k=RNG.randint(1, 60))) + f" {i}" for i in range(300)]


def read_text(folder, split):
    """The text of a split."""
    meta = json.loads((folder / "meta.json").read_text())
    return load_tokenizer(folder).decode(np.fromfile(folder / f"{split}.bin", meta["dtype"]).tolist())


# -- bounded memory, and the same result whatever the number of threads


@pytest.mark.parametrize("tokenizer, documents", [("byte", True), ("char", False), ("char", True)])
def test_the_files_do_not_depend_on_threads_or_blocks(tokenizer, documents, tmp_path, monkeypatch):
    found = []
    for n_threads, block in ((1, 2**20), (5, 100)):
        monkeypatch.setattr(encode, "n_cores", lambda n=n_threads: n)
        for module in (corpus, encode):
            monkeypatch.setattr(module, "BLOCK", block)
        folder = tmp_path / str(n_threads)
        write_corpus(folder, Texts(TEXTS[:-9], TEXTS[-9:]), tokenizer, {}, documents)
        found.append(contents(folder))
    assert found[0] == found[1]


@needs_rustbpe
def test_a_vocabulary_is_learned_only_from_the_training_text(tmp_path):
    write_corpus(tmp_path / "x", Texts(["mama mia, mama mia. "] * 9, ["zuzu zoo, zuzu zoo. "] * 99), "bpe:262", {})
    tokens = load_tokenizer(tmp_path / "x").token_byte_values()
    assert any(token.count(b"m") for token in tokens if len(token) > 1)
    assert not any(b"z" in token for token in tokens if len(token) > 1)


def test_only_a_few_chunks_are_held_at_a_time(monkeypatch):
    monkeypatch.setattr(encode, "BLOCK", 100)
    monkeypatch.setattr(corpus, "BLOCK", 100)
    monkeypatch.setattr(encode, "n_cores", lambda: 2)
    texts, taken = Texts(TEXTS, []), 0
    pieces = texts.pieces

    def counted(place=None):
        nonlocal taken
        for taken, piece in enumerate(pieces(place), 1):  # noqa: B007
            yield piece

    texts.pieces, given_back = counted, 0
    for part, *_ in encoded(texts, None, build_tokenizer("byte"), np.dtype("<u2")):
        given_back += len(part)
        assert taken - given_back < 40  # of more than 500: a chunk has up to eight
    assert given_back == taken > 300


def test_special_tokens_in_a_text_are_encoded_as_ordinary_text():
    tokens = [bytes([value]) for value in range(256)] + [b"a ", b"a c"]
    encoding = make_encoding("bpe", r"a cat|[\s\S]", tokens, {END_OF_TEXT: 258})
    texts = ["naïve <|endoftext|> a cat", "", "☕"]
    encodings = [item for _, part, _ in encoded(Texts(texts, []), None, encoding, np.dtype("<u2")) for item in part]
    assert [ids.tolist() for ids, _ in encodings] == [encoding.encode_ordinary(text) for text in texts]
    assert [n_bytes for _, n_bytes in encodings] == [len(text.encode()) for text in texts]


lines = st.lists(st.text("a. \n", max_size=9), max_size=9)


@given(lines, st.integers(1, 5), st.integers(6, 20))
def test_blocks_do_not_depend_on_how_a_text_is_split_into_parts(parts, block, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", block)
        patch.setattr(corpus, "LONGEST_BLOCK", longest)
        found = list(blocks(parts))
        assert found == list(blocks(["".join(parts)]))
    assert "".join(found) == "".join(parts) and all(len(text) <= longest for text in found)


@given(st.text("aé1.' \n\r\t\x1c\u3000", max_size=40), st.integers(1, 4))
@pytest.mark.parametrize("pattern", [GPT4_PATTERN, *GPT2_PATTERNS])
def test_blocks_are_encoded_to_the_ids_of_the_whole_text(pattern, text, block):
    pairs = [bytes(pair) for pair in product(b"a1.' \n\r\t", repeat=2)]  # their tokens show where the text is cut
    encoding = make_encoding("bpe", pattern, [bytes([value]) for value in range(256)] + pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", block)
        found = [encoding.encode_ordinary(part) for part in blocks([text])]
    assert [token for ids in found for token in ids] == encoding.encode_ordinary(text)


# -- which documents are val


@given(st.integers(2, 50), st.floats(1e-9, 0.999999))
def test_val_takes_the_documents_with_the_lowest_hashes_at_least_one_and_not_all(n, val_fraction):
    train, val = corpus.split_documents(TEXTS[:n], val_fraction)
    assert len(val) == min(max(1, round(n * val_fraction)), n - 1) and set(train + val) == set(TEXTS[:n])
    assert train == [text for text in TEXTS if text in train]
    assert max(map(sha256_of, val)) < min(map(sha256_of, train))


# -- files


def write_lines(path, texts, field="text"):
    others = [{"id": i if i % 7 else str(i), "on": None if i % 3 else {"day": i}} for i in range(len(texts))]
    records = [{**other, field: text} for other, text in zip(others, texts, strict=True)]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(lines) if path.name.endswith(".gz") else lines)


def write_link(path, texts, field="text"):
    write_lines(path.with_name("blob"), texts, field)
    path.symlink_to(path.with_name("blob"))


def write_parquet(path, texts, field="text"):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.core.pa.table({"id": list(range(len(texts))), field: texts})
    parquet.write_table(table, path, row_group_size=50)


LINES = ["x.jsonl", "x.json", "x.ndjson", "X.JSONL", "x.jsonl.gz", "without_suffix", "x.txt"]
FORMATS = {**dict.fromkeys(LINES, write_lines), "link.jsonl": write_link, "x.parquet": write_parquet}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_records_gives_the_same_files(name, tmp_path, monkeypatch):
    """From another field, among fields whose types vary, with records that are skipped because they hold no text."""
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    texts = ["2020-01-02", *TEXTS]
    FORMATS[name](tmp_path / name, [*texts, " ", None], "body")
    options = ["--field=body", "--tokenizer=byte", "--documents=lines", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / name), *options])
    val = [text for text in texts if split_of(text, 0.1) == "val"]
    assert 15 < len(val) < 45  # of 300
    train = [text for text in texts if text not in val]
    write_corpus(tmp_path / "expected", Texts(train, val), "byte", documents=True)
    found, expected = contents(tmp_path / "out"), contents(tmp_path / "expected")
    meta = json.loads(found.pop("meta.json"))
    assert meta["validation"] == "the documents whose SHA-256 is below 0.1 of the largest"
    assert found.items() < expected.items()


def test_half_of_a_surrogate_pair_is_read_as_the_replacement_character(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud83d\\ude00b\\ud83d"}\n{"text": null}\n')
    assert [parts for _, parts in Records([JsonLines(tmp_path / "x.jsonl")]).documents()] == [["a😀b\ufffd"]]


def test_an_empty_file_beside_records_is_skipped(tmp_path):
    write_lines(tmp_path / "in" / "x.jsonl", TEXTS)
    (tmp_path / "in" / "_SUCCESS").touch()
    own_text.main(["--input", str(tmp_path / "in"), "--tokenizer=byte", f"--out_dir={tmp_path / 'out'}"])
    assert len(read_text(tmp_path / "out", "train")) + len(read_text(tmp_path / "out", "val")) == len("".join(TEXTS))


def test_json_is_text_if_asked_for(tmp_path):
    (tmp_path / "x.json").write_text('{"text": "ab"}\n')
    options = ["--tokenizer=byte", "--as_text", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / "x.json"), *options])
    assert read_text(tmp_path / "out", "train") + read_text(tmp_path / "out", "val") == '{"text": "ab"}\n'


@pytest.mark.parametrize("documents", ["none", "lines", "files"])
def test_a_byte_order_mark_is_not_part_of_the_text(documents, tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffaé\nb\nc\n".encode())
    (tmp_path / "y.txt").write_bytes("\ufeffd\n".encode())
    options = ["--tokenizer=byte", f"--documents={documents}", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / "x.txt"), str(tmp_path / "y.txt"), *options])
    text = "".join(read_text(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(text.replace("\n", "")) == ["a", "b", "c", "d", "é"]


# -- separators of documents


@given(st.lists(st.text("<|>a \n", max_size=9), max_size=9), st.sampled_from(["<|>", "\n", "\n\n"]))
def test_a_text_is_separated_however_it_is_split_into_parts(parts, separator):
    found = ["".join(text) for text in separated(parts, separator)]
    texts = (text.lstrip() for text in "".join(parts).split(separator))
    assert found == [text for text in texts if text]
    assert len(list(separated(parts, separator))) == len(found)  # also if the parts are not taken, as in resuming


STORIES = ["One day.\n", " Two days.", "\n\n", "Three\ndays, the end.\n", "Four."]
STORIES_FILE = END_OF_TEXT.join(STORIES) + f"{END_OF_TEXT}\n"


@needs_rustbpe
@pytest.mark.parametrize("tokenizer", ["bpe:258", "byte"])
@pytest.mark.parametrize(
    "documents, texts",
    [
        ("none", ["One day.\n", "Two days.", "Three\ndays, the end.\n", "Four."]),
        ("lines", ["One day.", " Two days.", "Three", "days, the end.", "Four."]),
        ("files", ["One day.\n", "Two days.", "Three\ndays, the end.\n", "Four."]),
    ],
)
def test_end_of_text_in_a_text_separates_its_documents(documents, texts, tokenizer, tmp_path, monkeypatch, capsys):
    """Also where it spans two parts of the file. bpe does not learn it, and its bytes do not count."""
    monkeypatch.setattr(sources, "PART", 7)
    (tmp_path / "x.txt").write_text(STORIES_FILE)
    options = [f"--tokenizer={tokenizer}", f"--documents={documents}", "--val_fraction=0.4"]
    own_text.main(["--input", str(tmp_path / "x.txt"), *options, f"--out_dir={tmp_path / 'out'}"])
    assert "'<|endoftext|>' ends a document at 5 places; --separator= keeps" in capsys.readouterr().out
    encoding, meta = load_tokenizer(tmp_path / "out"), json.loads((tmp_path / "out" / "meta.json").read_text())
    end, found = end_of_text(encoding), []
    for split in ("train", "val"):
        ids = np.fromfile(tmp_path / "out" / f"{split}.bin", "<u2").tolist()
        if documents == "none":
            found.append(encoding.decode([token for token in ids if token != end]))
            n_ends = {"train": 3, "val": 2}[split]  # the third text is cut
            assert ids.count(end) == (0 if end is None else n_ends)
        else:
            index = np.fromfile(tmp_path / "out" / f"{split}.idx", "<u8").tolist()
            found += [encoding.decode(ids[start + 1 : stop - 1]) for start, stop in pairwise(index)]
    assert "".join(found) == "".join(texts) if documents == "none" else sorted(found) == sorted(texts)
    assert not any(b"endof" in token for token in encoding.token_byte_values())
    assert sum(meta["bytes"].values()) == len("".join(texts).encode())


def test_a_separator_is_never_cut_by_the_split(tmp_path):
    (tmp_path / "x.txt").write_text("a\nb<|endoftext|>\nc\nd")
    file = find_text(tmp_path / "x.txt", END_OF_TEXT)
    for cut in range(1, file.n_characters):
        found = Files([file], "none", 1 - (cut + 0.5) / file.n_characters, END_OF_TEXT).documents()
        texts = [(split, "".join(parts)) for split, parts in found]
        assert "".join(text for _, text in texts).replace("\n", "") == "abcd"
        assert len(texts) == 2 + (cut not in range(3, 18)), (cut, texts)


def test_a_separator_is_text_if_asked_for(tmp_path):
    (tmp_path / "x.txt").write_text(STORIES_FILE)
    options = ["--tokenizer=byte", "--separator=", f"--out_dir={tmp_path / 'out'}"]
    own_text.main(["--input", str(tmp_path / "x.txt"), *options])
    assert read_text(tmp_path / "out", "train") + read_text(tmp_path / "out", "val") == STORIES_FILE


def test_separated_documents_resume_from_any_of_them(tmp_path):
    """Of a record, from its last."""
    write_lines(tmp_path / "x.jsonl", [STORIES_FILE, "between", END_OF_TEXT, STORIES_FILE])
    (tmp_path / "x.txt").write_text(STORIES_FILE)
    for corpus_of in (
        lambda: Files([find_text(tmp_path / "x.txt", END_OF_TEXT)], "none", 0.3, END_OF_TEXT),
        lambda: Records([JsonLines(tmp_path / "x.jsonl")], separator=END_OF_TEXT),
    ):
        whole, places, one = [], [], corpus_of()
        for split, parts in one.documents():
            whole.append((split, "".join(parts)))
            places.append(json.loads(json.dumps(one.place)))
        assert len(whole) in (5, 9) and [place is None for place in places].count(True) in (0, 6)
        for n_done, place in enumerate(places, 1):
            if place is not None:
                rest = [(split, "".join(parts)) for split, parts in corpus_of().documents(place)]
                assert whole[:n_done] + rest == whole


# -- bad input: one line, nothing half-written


def write(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("x.jsonl", lambda path: write_lines(path, TEXTS, "body"), ["x.jsonl line 1", "'text'", "body", "--field"]),
        ("x.jsonl", write('{"text": "a"}\n\n{"text": '), ["x.jsonl line 3: not JSON"]),
        ("x.jsonl", write('{"text": "a"}\n"a"'), ["x.jsonl line 2: 'a'"]),
        ("x.txt", write('{"text": "a"}\na'), ["x.txt line 2: not JSON", "--as_text"]),
        ("x.jsonl", write('{"text": "a"}\n{"text": ["a"]}'), ["x.jsonl line 2", "'text' holds ['a']"]),
        ("x.json", write('[\n{"text": "a"}]'), ["x.json is a JSON array", "rows = json.load(sys.stdin)", "--as_text"]),
        ("x.csv", write("text\na"), ["x.csv is a table", "csv.DictReader", "x.jsonl", "--as_text"]),
        ("x.tsv", write("text\ta"), ["x.tsv is a table", "excel_tab"]),
        ("x.jsonl", lambda path: write_lines(path, TEXTS[:1]), ["too little text"]),
        ("x.jsonl.gz", lambda path: os.truncate(path, path.stat().st_size - 50), ["x.jsonl.gz cannot be read"]),
        ("x.parquet", lambda path: write_parquet(path, TEXTS, "body"), ["x.parquet", "'text'", "body", "--field"]),
        ("x.parquet", lambda path: write_parquet(path, [None, 1]), ["x.parquet row 2", "'text' holds 1"]),
        ("x.parquet", lambda path: os.truncate(path, path.stat().st_size - 50), ["x.parquet cannot be read"]),
    ],
)
def test_a_bad_corpus_is_refused_in_one_line_and_the_old_dataset_stays(name, damage, words, tmp_path, capfd):
    path, out = tmp_path / name, tmp_path / "out"
    write_corpus(out, Texts(["old"], ["dataset"]), "byte")
    old = contents(out)
    FORMATS.get(name, write_lines)(path, TEXTS)
    damage(path)
    line = refusal(own_text.main, ["--input", str(path), "--tokenizer=byte", f"--out_dir={out}", "--overwrite"])
    assert all(word in line for word in words), line
    assert len(line) < 600 and contents(out) == old and capfd.readouterr().err == ""


def test_inputs_of_two_kinds_and_pipes_are_refused(tmp_path):
    write_lines(tmp_path / "a.json", TEXTS)
    (tmp_path / "b.txt").write_text("a text")
    os.mkfifo(tmp_path / "pipe")
    for name, words in [
        (".", ["a.json holds records", "b.txt does not", "--as_text"]),
        ("pipe", ["cannot be read twice"]),
    ]:
        line = refusal(own_text.main, ["--input", str(tmp_path / name), f"--out_dir={tmp_path / 'out'}"])
        assert all(word in line for word in words), line


# -- streams of the hub, here local files that `datasets` streams


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Arguments of load_dataset for two local files of records."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path / "a.jsonl", TEXTS[:200])
    write_lines(tmp_path / "b.jsonl", TEXTS[200:])
    return {"path": "json", "data_files": [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]}


def prepare_hub(arguments, out, *options):
    options = ["--tokenizer=byte", f"--out_dir={out}", *options]
    openwebtext.prepare(options, openwebtext.__file__, "", arguments, val_fraction=0.1)


@pytest.mark.slow
def test_a_limit_ends_at_the_document_that_reaches_it(hub, tmp_path):
    n = 0
    for limit in (1000, 5000, 1e6):
        prepare_hub(hub, tmp_path / "out", f"--limit_tokens={limit}", "--val_fraction=0.3", "--overwrite")
        counts = json.loads((tmp_path / "out" / "meta.json").read_text())["tokens"]
        before, n = n, sum(counts.values())
        longest = max(len(text.encode()) for text in TEXTS)
        assert limit <= n < limit + longest or n == len("".join(TEXTS).encode())
        assert n > before and min(counts.values()) > 0


def hub_streams(hub):
    return [Stream({**hub, "data_files": [path]}) for path in hub["data_files"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sources",
    [
        lambda hub: [Stream(hub)],
        hub_streams,
        lambda hub: [JsonLines(Path(path)) for path in hub["data_files"]],
        lambda hub: [JsonLines(Path(hub["data_files"][0])), Parquet(Path(hub["data_files"][0]).with_name("b.parquet"))],
    ],
    ids=["a stream", "two streams", "JSON lines", "JSON lines and Parquet"],
)
def test_records_resume_from_any_document(sources, hub, tmp_path):
    write_parquet(tmp_path / "b.parquet", TEXTS[200:])
    whole = list(Records(sources(hub)).documents())
    assert [text for _, [text] in whole] == TEXTS
    for n_done in (1, 199, 200, 201, len(whole) - 1):
        records = Records(sources(hub))
        documents = records.documents()
        read = [next(documents) for _ in range(n_done)]
        place = json.loads(json.dumps(records.place))
        assert read + list(Records(sources(hub)).documents(place)) == whole
