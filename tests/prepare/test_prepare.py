"""Preparing a dataset is atomic and deterministic, and the files match meta.json."""

import json
import os
import shutil
import sysconfig
import urllib.error
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, contents, needs_rustbpe, refusal
from processes import python

from data.python_packages import prepare as python_packages
from data.python_stdlib import prepare as python_stdlib
from data.shakespeare import prepare as shakespeare
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as own_text
from nanoladder.prepare import writer
from nanoladder.prepare.corpus import Texts
from nanoladder.prepare.meta import sample_digest
from nanoladder.prepare.writer import PrepareParser, write_corpus
from nanoladder.tokenizer.encoding import EVERY_CHARACTER, build_tokenizer, load_tokenizer, make_encoding
from nanoladder.tokenizer.huggingface import to_huggingface

TRAIN = ["the cat sat on the mat\n", "the hat and the bat, 1234 naïve cafés\n\n", "that is that"]
VAL = ["a mat on a cat\n", "the end"]


def read_meta(folder):
    return json.loads((folder / "meta.json").read_text())


def read_ids(folder, split):
    return np.fromfile(folder / f"{split}.bin", read_meta(folder)["dtype"]).tolist()


def assert_whole(folder):
    """Asserts that the folder holds the files that meta.json describes, and no others."""
    meta = read_meta(folder)
    assert all(sample_digest(folder / name) == digest for name, digest in meta["digests"].items())
    assert load_tokenizer(folder).n_vocab == meta["vocab_size"]
    assert {path.name for path in folder.iterdir()} == {"meta.json", *meta["digests"]}


def write_dataset(folder, train, val, *args, **kwargs):
    return write_corpus(folder, Texts(train, val), *args, **kwargs)


# -- the writer


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tokenizer", [pytest.param("bpe:270", marks=needs_rustbpe), "char", "byte"])
def test_the_files_decode_to_the_texts_and_documents_lie_where_the_index_says(tokenizer, documents, tmp_path):
    meta = write_dataset(tmp_path, TRAIN, VAL, tokenizer, {"python_version": "3.x"}, documents)
    assert meta == read_meta(tmp_path) and meta["python_version"] == "3.x" and meta["documents"] is documents
    assert_whole(tmp_path)
    encoding, end = load_tokenizer(tmp_path), "<|endoftext|>" if tokenizer == "bpe:270" else "\n" * documents
    for split, texts in (("train", TRAIN), ("val", VAL)):
        ids, marked = read_ids(tmp_path, split), [end * documents + text + end for text in texts]
        assert encoding.decode(ids) == "".join(marked)
        assert meta["tokens"][split] == len(ids)
        assert meta["bytes"][split] == len("".join(texts).encode())
        if documents:
            offsets = np.fromfile(tmp_path / f"{split}.idx", "<u8").tolist()
            assert [encoding.decode(ids[start:stop]) for start, stop in pairwise(offsets)] == marked


@pytest.mark.parametrize("n_vocab, dtype", [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(n_vocab, dtype, tmp_path, monkeypatch):
    tokens = [i.to_bytes(1) for i in range(256)] + [i.to_bytes(3) for i in range(n_vocab - 256)]
    tokens[-1] = "€".encode()
    monkeypatch.setattr(writer, "build_tokenizer", lambda *_: make_encoding("big", EVERY_CHARACTER, tokens))
    write_dataset(tmp_path, ["a€"], ["€a"], "byte")
    assert read_meta(tmp_path)["dtype"] == dtype
    assert read_ids(tmp_path, "train") == [ord("a"), n_vocab - 1]
    assert (tmp_path / "train.bin").stat().st_size == 2 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("train, val, named", [([""], VAL, "train"), (TRAIN, [], "val"), (["hi"], ["!"], "val")])
def test_an_empty_split_is_refused(train, val, named, tmp_path):
    """So is one of a single token, which leaves none to predict."""
    assert f"too little text for {named}" in refusal(write_dataset, tmp_path, train, val, "byte")
    assert contents(tmp_path) == {}


# -- all or nothing


@pytest.mark.parametrize("kept", [["metrics.jsonl"], ["best.safetensors"], ["config.json"]])
def test_a_dataset_never_replaces_the_tokenizer_of_a_run_or_model(kept, trained, tmp_path):
    for name in ["tokenizer.json", "tokenizer.tiktoken", *kept]:
        shutil.copyfile(f"{trained.out_dir}/{name}", tmp_path / name)
    before = contents(tmp_path)
    for overwrite in (False, True):
        line = refusal(write_dataset, tmp_path, TRAIN, VAL, "byte", overwrite=overwrite)
        assert f"holds a model, with its own tokenizer ({kept[0]})" in line and contents(tmp_path) == before


@pytest.mark.parametrize(
    "other, held",
    [
        ({"train": TRAIN[:2]}, "*"),
        ({"tokenizer": "char"}, "*"),
        ({"documents": True}, "*"),
        ({"extra": {"x": 1}}, "*"),
        ({"limit_tokens": 10**6}, "*"),
        ({}, "*.bin"),  # as nanoGPT leaves a folder
        ({}, "tokenizer.json"),
        ({"train": TRAIN[:2]}, "meta.json"),
    ],
)
def test_another_dataset_is_replaced_only_if_asked(other, held, tmp_path):
    """held: pattern of the files that are left of it."""
    given = {"train": TRAIN, "val": VAL, "tokenizer": "byte"}
    write_dataset(tmp_path, **given)
    for path in set(tmp_path.iterdir()) - set(tmp_path.glob(held)):
        path.unlink()
    before = contents(tmp_path)
    line = refusal(write_dataset, tmp_path, **given | other)
    assert f"{tmp_path} holds a dataset (" in line and "--overwrite" in line and contents(tmp_path) == before
    write_dataset(tmp_path, **given | other, overwrite=True)
    assert_whole(tmp_path)
    assert contents(tmp_path) != before


@pytest.mark.parametrize("event", range(1, 6))
def test_a_replacement_that_was_interrupted_is_completed_by_any_later_command(event, tmp_path, monkeypatch):
    """event: the file, counted from 1, before which Ctrl-C comes."""
    folder, moved, replace = tmp_path / "x", [], os.replace
    for path in (folder, tmp_path / "whole"):
        write_dataset(path, ["old"], ["dataset"], "byte", documents=True)
    write_dataset(tmp_path / "whole", TRAIN, VAL, "char", overwrite=True)

    def interrupted(source, target):
        moved.extend([target] * (target.parent == folder))
        if len(moved) == event:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupted)
        write_dataset(folder, TRAIN, VAL, "char", overwrite=True)
    assert not (folder / "meta.json").exists()
    assert "holds a dataset" in refusal(write_dataset, folder, TRAIN, VAL, "byte")
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", [None, "train.bin", "tokenizer.json"])
def test_the_same_dataset_is_prepared_again_only_if_it_is_damaged(damage, tmp_path, capsys, monkeypatch):
    meta = write_dataset(tmp_path, TRAIN, VAL, "byte")
    before = contents(tmp_path)
    if damage:
        (tmp_path / damage).write_bytes(b"damaged")
    else:
        monkeypatch.setattr(writer, "write_tokens", None)
    assert write_dataset(tmp_path, TRAIN, VAL, "byte") == meta and contents(tmp_path) == before
    said = f"{tmp_path / damage} is not the file that meta.json describes: preparing" if damage else "already holds"
    assert said in capsys.readouterr().out


# -- the datasets


def test_another_tokenizer_goes_beside_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("out", "out/gpt2"):
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_text(json.dumps(to_huggingface(build_tokenizer("byte"))))
    parser = PrepareParser("", tokenizer="bpe:4096")
    script = "/repo/data/x/prepare.py"
    for argv, folder in [
        ([], "/repo/data/x"),
        (["--tokenizer=bpe:4096"], "/repo/data/x"),
        (["--tokenizer=byte"], "/repo/data/x_byte"),
        (["--tokenizer", "bpe:8192"], "/repo/data/x_bpe8192"),
        (["--tokenizer=byte", "--out_dir=elsewhere"], "elsewhere"),
        (["--tokenizer=out/gpt2"], "/repo/data/x_out_gpt2"),  # not the folder of --tokenizer=gpt2
        (["--tokenizer=hf:./out"], "/repo/data/x_hf_out"),
    ]:
        assert parser.out_dir(parser.parse_args(argv), script) == Path(folder)


def test_python_stdlib_is_split_by_modules(tmp_path, monkeypatch):
    sources = python_stdlib.read_sources(Path(sysconfig.get_path("stdlib")))
    assert 7e6 < sum(map(len, sources.values())) < 20e6
    few = {path: text for path, text in sources.items() if path.split("/")[0] in ("json", "email", "abc.py", "ast.py")}
    monkeypatch.setattr(python_stdlib, "read_sources", lambda folder: few)
    python_stdlib.main(["--tokenizer=byte", f"--out_dir={tmp_path}"])
    assert_whole(tmp_path)
    meta = read_meta(tmp_path)
    assert meta["files"] == {"train": len(few) - meta["files"]["val"], "val": max(1, round(len(few) / 10))}


@pytest.mark.slow
def test_a_script_runs_from_any_folder(tmp_path):
    (tmp_path / "x.txt").write_text("a text\n" * 100)
    options = ["--input", "x.txt", "--tokenizer=byte", "--out_dir=out"]
    done = python(ROOT / "data" / "text" / "prepare.py", *options, cwd=tmp_path)
    assert done.returncode == 0 and "--dataset=" in done.stdout and done.stderr == ""
    assert_whole(tmp_path / "out")


def test_python_stdlib_reads_sources_in_utf8_without_tests(tmp_path):
    left_out = ["test/t.py", "a/tests/t.py", "site-packages/p.py", "_sysconfigdata_x.py", "notes.txt"]
    for name in ["b.py", "a/x.py", *left_out]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    assert python_stdlib.read_sources(tmp_path) == {"a/x.py": "# a/x.py", "b.py": "# b.py"}


def test_python_packages_are_the_pinned_ones_without_tests_and_generated_files():
    pins = python_packages.read_pins(python_packages.REQUIREMENTS)
    assert pins.keys() >= {"torch", "numpy", "Pygments"} | python_packages.HELD_OUT
    sources = python_packages.read_sources("matplotlib", pins["matplotlib"])
    assert {"matplotlib/figure.py", "mpl_toolkits/mplot3d/axes3d.py"} <= sources.keys()
    assert not {"matplotlib/tests/test_axes.py", "matplotlib/_version.py", "matplotlib/_cm.py"} & sources.keys()
    assert sources["matplotlib/figure.py"].startswith('"""')


def test_python_packages_of_another_version_are_refused():
    assert "requirements.txt pins 1.0, and" in refusal(python_packages.read_sources, "numpy", "1.0")
    assert refusal(python_packages.read_sources, "no-such-package", "1").startswith("no-such-package is not installed")


def test_python_packages_hold_out_whole_packages_and_train_on_no_copy_of_their_files():
    names = [*python_packages.HELD_OUT, "torch", "numpy"]
    packages = {name: {f"{name}/own.py": f"# {name}"} for name in names}
    packages["torch"] |= {"torch/again.py": "# torch", "torch/_vendor/std.py": "# tqdm", "torch/empty.py": ""}
    train, val = python_packages.split_packages(packages)
    assert sorted(train) == ["# numpy", "# torch"]
    assert sorted(val) == sorted(f"# {package}" for package in python_packages.HELD_OUT)


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


@pytest.mark.parametrize(
    "options, texts",
    [
        ([], ["drittes Stück\n", "first line\r\n\nsecond line\n"]),
        (["--documents=lines", "--val_fraction=0.4"], ["\ndrittes Stück\n\nsecond line\n", "\nfirst line\n"]),
        (["--documents=files"], ["\ndrittes Stück\n\n", "\nfirst line\r\n\nsecond line\n\n"]),
    ],
)
def test_text_takes_folders_and_says_what_it_skipped(options, texts, folder, tmp_path, capsys):
    """A file named twice is read once; a dataset in the input folder is not read as text."""
    for _ in range(2):
        splits = prepare_text(tmp_path, "--input", folder, tmp_path, *options)
        assert sorted(splits.values()) == texts and read_meta(tmp_path / "out")["documents"] == bool(options)
        said = capsys.readouterr().out.splitlines()[0]
        assert said == "files read: 2, skipped because they are not text in UTF-8: 2"


def test_one_text_is_split_at_its_end(folder, tmp_path):
    splits = prepare_text(tmp_path, "--input", folder / "below" / "two.md", "--val_fraction=0.3")
    assert splits == {"train": "drittes S", "val": "tück\n"}


def test_shakespeare_is_downloaded_and_checked_or_copied(tmp_path, monkeypatch):
    def fail(url, timeout):
        raise urllib.error.URLError("no network")

    play, out = tmp_path / "play.txt", f"--out_dir={tmp_path / 'out'}"
    play.write_text("To be, or not to be.\n" * 10)
    shakespeare_char.main([f"--input={play}", out])
    assert_whole(tmp_path / "out")
    assert read_meta(tmp_path / "out")["tokens"] == {"train": 189, "val": 21}
    for urlopen, reason in [(fail, "no network"), (lambda url, timeout: play.open("rb"), "SHA-256")]:
        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        message = refusal(shakespeare.main, ["--tokenizer=byte", out])
        assert shakespeare.URL in message and "--input=FILE" in message and reason in message
