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

import sample
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
from nanoladder.errors import BadInput

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


def test_400_attacks_on_the_files_are_refused_and_nothing_is_written(twins, tmp_path, refused):
    cases = []

    @settings(max_examples=400)
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
    assert len(set(cases)) == 400
    assert all(sum(what in case for case in cases) >= 10 for what in ("truncate", "flip", "transplant", "put"))


@pytest.mark.parametrize("name", ["meta.json", "val.bin", "val.idx", "tokenizer.json"])
def test_no_bit_of_a_file_can_flip(name, documents, tmp_path):
    folder = shutil.copytree(documents, tmp_path / "flipped")
    open_dataset(tiny(dataset=str(folder)))  # from now on it is remembered as whole
    whole = (folder / name).read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(content)
        with pytest.raises(BadInput):
            open_dataset(tiny(dataset=str(folder)))
    (folder / name).write_bytes(whole)
    assert open_dataset(tiny(dataset=str(folder)))


NO_COUNTS = [0, -1, 1.5, 1e30, True, None, "9", [], [9], {}, 10**30, float("nan"), float("inf")]
NO_META = {
    "format_version": [0, 1, 3, -1, "1", None, [], 10**30, float("nan")],
    "vocab_size": [*NO_COUNTS, 2**16 + 1],
    "tokens": [*NO_COUNTS, *({"train": count, "val": 360} for count in NO_COUNTS), {"train": 9}],
    "bytes": [*NO_COUNTS, *({"train": 9, "val": count} for count in NO_COUNTS), {"train": 9}],
    "dtype": ["uint8", "O", "object", "V8", "u2,u2", "<u2", "M8[s]", "", 2, None, ["uint16"], {"a": ["O", 0]}],
    "documents": [0, 1, "true", None, [], {}],
    "tokenizer": [None, 7, ["byte"], "a\nb", "\x1b[2J", "\ud800", "x" * 10**5],
    "sha256": [{}, None, [], "x", 7, {"train.bin": 7}, {"../train.bin": "x"}],
    "checksum": [None, 7, "", "0" * 64, []],
}


@pytest.mark.parametrize("key", NO_META)
def test_a_forged_entry_of_meta_json_is_refused(key, dense, tmp_path, refused):
    folder = shutil.copytree(dense, tmp_path / "forged")
    meta = json.loads((folder / "meta.json").read_text())
    for value in NO_META[key]:
        write_meta(folder, {**meta, key: value})
        if key == "checksum":
            (folder / "meta.json").write_text(json.dumps({**meta, key: value}))
        line = refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))
        assert str(folder) in line and len(line) < 500, line
    write_meta(folder, {name: meta[name] for name in meta if name != key})
    if key != "checksum":
        assert key in refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


NO_JSON = {
    "nothing": b"",
    "a number": b"7",
    "null": b"null",
    "a text": b'"meta"',
    "a list": b"[1]",
    "a deep list": b"[" * 100_000,
    "a deep dict": b'{"a":' * 100_000,
    "a deep but whole list": b"[" * 900 + b"]" * 900,
    "a deep entry": b'{"format_version": 2, "dtype": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a huge number": b'{"format_version": ' + b"9" * 10_000 + b"}",
    "no UTF-8": b'{"format_version": "\xff"}',
    "NULs": b"\0" * 100,
    "much": b'{"a": "' + b"x" * 2**21 + b'"}',
}


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", NO_JSON)
def test_what_is_no_json_object_is_refused(kind, name, dense, run, tmp_path, refused):
    folder = shutil.copytree(dense if name == "meta.json" else run, tmp_path / "odd")
    (folder / name).write_bytes(NO_JSON[kind])
    if name == "meta.json":
        line = refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))
    else:
        line = refused(sample.main, f"--out_dir={folder}")
    assert str(folder) in line and len(line) < 500 and not (tmp_path / "out").exists()


def offsets(*values):
    return np.array(values, np.uint64).tobytes()


@pytest.mark.parametrize(
    "index",
    [
        b"",
        offsets(0),
        offsets(0, 0),
        offsets(0, 1, 100),
        offsets(0, 50, 40, 100),
        offsets(0, 50, 99),
        offsets(1, 50, 100),
        offsets(0, 2**63, 100),
        offsets(0, 2**62, 2**63, 2**63 + 2**62, 100),  # the gaps, wrapping around, are all large enough
        offsets(0, 2**64 - 1, 100),
        offsets(0, 50, 100) + b"\0",
        offsets(*range(0, 101)),
    ],
    ids=lambda index: np.frombuffer(index[: len(index) // 8 * 8], np.uint64).tolist().__str__()[:40],
)
def test_a_forged_index_is_refused(index, tmp_path, refused):
    folder = write_folder(tmp_path / "forged", [[1] * 50] * 2, [[1] * 50] * 2, 2)
    (folder / "val.idx").write_bytes(index)
    seal(folder)
    line = refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))
    assert "val.idx" in line and not (tmp_path / "out").exists()


def test_a_forged_id_is_refused(dense, tmp_path, refused):
    folder = shutil.copytree(dense, tmp_path / "forged")
    (folder / "val.bin").write_bytes(b"\xff\xff" + (folder / "val.bin").read_bytes()[2:])
    seal(folder)
    assert "token id 65535" in refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out"))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"nothing", "an empty file"}))
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json"])
def test_a_folder_made_by_nanogpt_is_not_trusted_either(kind, name, dense, tmp_path, refused):
    folder = shutil.copytree(dense, tmp_path / "nanogpt")
    (folder / "meta.json").unlink()
    assert open_dataset(tiny(dataset=str(folder), vocab_size=60))
    put(kind, folder / name)
    assert name in refused(train.main, *flags(dataset=folder, out_dir=tmp_path / "out", vocab_size=60))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset", ["x" * 999, "x/" * 499, "/dev/null", "data/loader.py/x", "~"])
def test_a_dataset_that_is_no_folder(dataset, tmp_path, refused):
    assert "no train.bin" in refused(train.main, *flags(dataset=dataset, out_dir=tmp_path / "out"))


# -- tokenizers, in a run's folder


@pytest.fixture(scope="session")
def run(dense, tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("run") / "out"
    train.main(flags(dataset=dense, out_dir=folder, max_steps=1, vocab_size=300))
    return folder


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


def test_a_tokenizer_that_fits_is_taken(run, tmp_path, run_main):
    folder = shutil.copytree(run, tmp_path / "run")
    forge(folder, BYTES)
    words = [f"--out_dir={folder}", "--device=cpu", "--max_new_tokens=3", "--prompt=a"]
    assert run_main(sample.main, *words).code == 0


NO_TOKENIZERS = {
    **{f"name {value!r}": (BYTES, {"name": value}) for value in (None, 7, [], {})},
    **{
        f"pattern {value!r:.20}": (BYTES, {"pattern": value})
        for value in (None, 7, [], "", "(", "[", "(a+)+$", r"\w", "(?:" * 10**5, "(?:a{999}){999}", "\0")
    },
    **{
        f"special tokens {value!r}": (BYTES, {"special_tokens": value})
        for value in (
            *(None, 7, "x", [END_OF_TEXT], {END_OF_TEXT: -1}, {END_OF_TEXT: 0}, {END_OF_TEXT: 257}),
            *({END_OF_TEXT: "256"}, {END_OF_TEXT: None}, {END_OF_TEXT: 10**30}, {END_OF_TEXT: [256]}),
            *({END_OF_TEXT: 256.5}, {"": 256}, {"\n": 256}, {"a": 256}, {}),
        )
    },
    **{f"vocabulary of {value!r}": (BYTES, {"vocab_size": value}) for value in (None, -1, 256, "257", [], 10**30)},
    **{f"digest {value!r}": (BYTES, {"sha256": value}) for value in (None, 7, "", [])},
    "a byte is missing": (BYTES[:-1], {}),
    "a token twice": ([*BYTES, b"a"], {}),
    "no tokens": ([], {}),
    "an empty token": ([*BYTES, b""], {}),
    "char without characters": ([], {"name": "char", "pattern": EVERY_CHARACTER}),
    "char of half characters": (BYTES, {"name": "char", "pattern": EVERY_CHARACTER}),
    "char of two characters": ([b"a", b"ab"], {"name": "char", "pattern": EVERY_CHARACTER}),
    "char cut into words": ([b"a"], {"name": "char"}),
    "characters by another name": ([b"a", b"b"], {"pattern": EVERY_CHARACTER}),
    "larger than the model": ([*BYTES, *(b"%03d" % number for number in range(100))], {}),
}


@pytest.mark.parametrize("case", NO_TOKENIZERS)
def test_a_forged_tokenizer_is_refused(case, run, tmp_path, refused):
    tokens, changes = NO_TOKENIZERS[case]
    folder = shutil.copytree(run, tmp_path / "run")
    forge(folder, tokens, **changes)
    line = refused(sample.main, f"--out_dir={folder}", "--device=cpu", "--prompt=abc")
    assert str(folder) in line and len(line) < 500


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.tiktoken"])
def test_what_is_no_file_is_no_tokenizer(kind, name, run, tmp_path, refused):
    folder = shutil.copytree(run, tmp_path / "run")
    put(kind, folder / name)
    assert str(folder) in refused(sample.main, f"--out_dir={folder}", "--device=cpu")


def test_tiktokens_own_pattern_of_gpt2_is_known():
    assert tiktoken_ext.openai_public.r50k_pat_str in GPT2_PATTERNS


ranks = st.lists(st.binary(min_size=2, max_size=4), unique=True, max_size=30).map(lambda merges: BYTES + merges)


@given(tokens=ranks, pattern=st.sampled_from([GPT4_PATTERN, EVERY_CHARACTER, *GPT2_PATTERNS]), text=st.text())
def test_whatever_tokenizer_is_taken_encodes_any_text(tokens, pattern, text, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    forge(folder, tokens, pattern=pattern)
    encoding = load_tokenizer(folder)
    assert encoding.decode(encode(encoding, text)) == text


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"an empty file"}))
def test_what_is_no_file_is_no_config(kind, tmp_path, refused):
    path = tmp_path / "x.py"
    KINDS[kind](path)
    assert str(path) in refused(train.main, str(path))
