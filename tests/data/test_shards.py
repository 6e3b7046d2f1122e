"""A split in shards reads as one stream; an interrupted preparation goes on, and ends with the same files."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, flags, tiny, write_folder, write_meta
from hypothesis import given
from hypothesis import strategies as st
from processes import holding, python
from tqdm import tqdm

import train
from nanoladder.data import checks, corpus, encode, open_dataset, shards
from nanoladder.data.checks import VERIFIED
from nanoladder.data.corpus import Texts
from nanoladder.data.meta import shard_name, token_files
from nanoladder.data.shards import UNFINISHED, SplitFiles
from nanoladder.data.sources import Files, find_file
from nanoladder.data.writer import sha256, write_corpus
from nanoladder.errors import BadInput

T = 8
RNG = random.Random(0)
TEXTS = ["".join(RNG.choices("abcde \n", k=RNG.randint(1, 60))) for _ in range(60)]


def cut_into_shards(folder, counts):
    """Turns the train.bin of a folder into shards of these numbers of tokens."""
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.fromfile(folder / "train.bin", meta["dtype"])
    (folder / "train.bin").unlink()
    del meta["sha256"]["train.bin"]
    for number, part in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
        path = folder / shard_name("train", number)
        part.tofile(path)
        meta["sha256"][path.name] = sha256(path)
    write_meta(folder, {**meta, "shards": {"train": counts}})


def contents(folder):
    """{file name: SHA-256}."""
    return {path.name: sha256(path) for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED}


def open_split(folder, context_length=T):
    return open_dataset(tiny(dataset=str(folder), context_length=context_length)).train


# -- reading


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two folders that every example of hypothesis writes anew."""
    root = tmp_path_factory.mktemp("shards")
    return root / "whole", root / "cut"


@given(
    counts=st.lists(st.integers(1, 5 * T), min_size=2, max_size=9),
    documents=st.booleans(),
    dtype=st.sampled_from(["uint16", "uint32"]),
    data=st.data(),
)
def test_shards_read_as_one_file(folders, counts, documents, dtype, data):
    """Windows run across shards, of which some are shorter than a window."""
    ids = list(range(1, sum(counts) + 1))
    if sum(counts) < T + 2:
        return
    if documents:
        edges = sorted(data.draw(st.sets(st.integers(1, len(ids) // 2 - 1), max_size=9)))
        edges = [0, *(2 * edge for edge in edges), len(ids)]
        ids = [ids[start:end] for start, end in pairwise(edges)]
    whole, cut = (write_folder(folder, ids, ids, 60_000, dtype) for folder in folders)
    for path in cut.glob("train_*"):
        path.unlink()
    cut_into_shards(cut, counts)
    ours, theirs = open_split(cut), open_split(whole)
    assert ours.n_windows == theirs.n_windows and ours.n_phases == theirs.n_phases
    windows = np.random.default_rng(0).permutation(ours.n_windows)
    for phase in range(ours.n_phases):
        for found, expected in zip(ours.read(windows, phase), theirs.read(windows, phase), strict=True):
            assert found.dtype == np.int64 and (found == expected).all()


@pytest.fixture
def sharded(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "sharded")
    n_tokens = json.loads((folder / "meta.json").read_text())["tokens"]["train"]
    cut_into_shards(folder, [500, 500, n_tokens - 1000])
    return folder


def test_training_on_shards_is_training_on_one_file(dense, sharded, tmp_path):
    logs = []
    for folder in (dense, sharded):
        train.main(flags(dataset=folder, out_dir=tmp_path / folder.name / "out", max_steps=5))
        lines = (tmp_path / folder.name / "out" / "metrics.jsonl").read_text().splitlines()
        logs.append([json.loads(line).get("train_loss") for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) > 1


def test_each_shard_is_verified_once(sharded, monkeypatch):
    names, scan = [], checks.scan
    monkeypatch.setattr(checks, "scan", lambda path, dtype: names.append(path.name) or scan(path, dtype))
    for _ in range(2):
        open_split(sharded)
    assert names == ["train_000.bin", "train_001.bin", "train_002.bin", "val.bin"]


def test_a_sample_of_many_shards_reads_no_more_than_that_of_one():
    assert checks.blocks_each(1) == checks.BLOCKS
    assert all(n * checks.blocks_each(n) <= checks.BLOCKS for n in range(1, 33))


def swap(folder):
    (folder / "train_000.bin").rename(folder / "x")
    (folder / "train_001.bin").rename(folder / "train_000.bin")
    (folder / "x").rename(folder / "train_001.bin")


def overwrite(path):
    path.write_bytes(bytes(path.stat().st_size))


def forge(folder, **changes):
    write_meta(folder, {**json.loads((folder / "meta.json").read_text()), **changes})


DAMAGED = {
    "a shard is gone": (lambda f: (f / "train_001.bin").unlink(), ["train_001.bin", "missing"]),
    "the first is gone": (lambda f: (f / "train_000.bin").unlink(), ["no train.bin"]),
    "a shard is cut": (lambda f: (f / "train_002.bin").write_bytes(bytes(6)), ["train_002.bin", "truncated"]),
    "a shard of others": (lambda f: overwrite(f / "train_001.bin"), ["train_001.bin", "SHA-256"]),
    "two are swapped": (swap, ["train_000.bin", "SHA-256"]),
    "counts do not add up": (lambda f: forge(f, shards={"train": [500, 500]}), ["meta.json", "shards"]),
    "no counts": (lambda f: forge(f, shards={"train": [None]}), ["meta.json", "shards"]),
    "a list": (lambda f: forge(f, shards=[]), ["meta.json", "shards"]),
    "an unknown split": (lambda f: forge(f, shards={"x": [1]}), ["meta.json", "shards"]),
    "negative counts": (lambda f: forge(f, shards={"train": [-1, 1001, 500]}), ["meta.json", "shards"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_shard_is_named(case, sharded, tmp_path, refused):
    damage, words = DAMAGED[case]
    open_split(sharded)  # from now on it is remembered as whole
    damage(sharded)
    line = refused(train.main, *flags(dataset=sharded, out_dir=tmp_path / "out"))
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


# -- writing


@pytest.mark.parametrize("shard_tokens, names", [(30, ["train_000", "train_001", "train_002"]), (90, ["train"])])
def test_every_shard_but_the_last_is_full(shard_tokens, names, tmp_path):
    write_corpus(tmp_path, Texts(["a" * 50, "b" * 40], ["val"]), "byte", shard_tokens=shard_tokens)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert list(token_files(meta, "train")) == [f"{name}.bin" for name in names]
    assert "".join((tmp_path / f"{name}.bin").read_bytes()[::2].decode() for name in names) == "a" * 50 + "b" * 40
    assert {path.name for path in tmp_path.iterdir()} == {"meta.json", VERIFIED, *meta["sha256"]}


def test_a_new_dataset_takes_the_shards_of_the_old_one_away(tmp_path):
    (tmp_path / "train_notes.bin").write_text("mine")
    for shard_tokens in (10, 30, 1000, 10):
        write_corpus(tmp_path, Texts(["a" * 50], ["b" * 20]), "byte", shard_tokens=shard_tokens)
        meta = json.loads((tmp_path / "meta.json").read_text())
        assert {path.name for path in tmp_path.iterdir()} == {"meta.json", VERIFIED, "train_notes.bin", *meta["sha256"]}


def test_what_the_writer_wrote_is_not_read_again(tmp_path, monkeypatch):
    write_corpus(tmp_path, Texts(["a" * 50], ["b" * 20]), "byte", shard_tokens=20)
    monkeypatch.setattr(checks, "scan", None)
    assert open_split(tmp_path).n_windows


# -- interrupted


def killed_at(event, function, *arguments):
    """Calls a function in a process of its own that is killed by SIGKILL right before one of the calls by which the
    writer touches files, counted from 1. Returns True if it came to its end before."""

    def child():
        count = 0

        def counting(call):
            def counted(*args, **kwargs):
                nonlocal count
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return counted

        for name in ("fsync", "replace", "truncate"):
            setattr(os, name, counting(getattr(os, name)))
        Path.unlink = counting(Path.unlink)
        SplitFiles.write = counting(flushed(SplitFiles.write))
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def flushed(write):
    """SplitFiles.write that leaves nothing in Python's buffers, as happens with more than a few ids."""

    def write_and_flush(self):
        filled = write(self)
        for file in self.open_files():
            file.flush()
        return filled

    return write_and_flush


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """prepare(folder) -> writes a dataset of a few shards into it, on top of an older one."""
    for module in (corpus, encode):
        monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread could hold a lock while a process is forked
    if tqdm.monitor:
        tqdm.monitor.exit()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that the kernel has
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join(TEXTS))
    files = [find_file(tmp_path / f"{name}.txt") for name in "ab"]

    def prepare(folder, shard_tokens=700):
        write_corpus(folder, Files(files, lines=True, val_fraction=0.4), "byte", {}, True, shard_tokens, workers=2)

    return prepare


def make_old(folder):
    write_corpus(folder, Texts(["old"] * 9, ["dataset"]), "byte", shard_tokens=20)
    return folder


@pytest.mark.slow
@needs_fork
def test_killed_at_any_instant_it_goes_on_to_the_same_files(prepare, tmp_path):
    prepare(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert {"train_002.bin", "val_001.bin"} < set(expected)
    old, seen, event = contents(make_old(tmp_path / "old")), [], 0
    while True:
        event += 9
        folder = shutil.copytree(tmp_path / "old", tmp_path / "new")
        if killed_at(event, prepare, folder):
            break
        visible = {path.name: sha256(path) for path in folder.iterdir() if not path.name.startswith(".")}
        seen.append("meta.json" in visible)
        assert visible in (old, expected) or "meta.json" not in visible
        prepare(folder)
        assert contents(folder) == expected
        shutil.rmtree(folder)
    assert len(seen) > 12 and not all(seen)  # also while it moved into place


@pytest.mark.slow
@needs_fork
def test_killed_again_and_again_it_comes_to_its_end(prepare, tmp_path):
    prepare(tmp_path / "whole")
    rng, n_killed = random.Random(0), 0
    while not killed_at(rng.randint(25, 45 + 5 * n_killed), prepare, tmp_path / "new"):
        n_killed += 1
        assert n_killed < 60
    assert n_killed > 2 and contents(tmp_path / "new") == contents(tmp_path / "whole")


def interrupt(prepare, folder):
    """Kills a preparation after its first journal."""
    for event in range(10, 1000, 10):
        assert not killed_at(event, prepare, folder)
        if (folder / UNFINISHED / shards.JOURNAL).exists():
            return folder


@pytest.mark.slow
@needs_fork
def test_it_goes_on_from_the_last_full_shard(prepare, tmp_path, monkeypatch):
    prepare(tmp_path / "whole")
    folder = interrupt(prepare, tmp_path / "new")
    appended, append = [], SplitFiles.append
    monkeypatch.setattr(SplitFiles, "append", lambda self, *ids: appended.extend(ids) or append(self, *ids))
    prepare(folder)
    n_tokens = sum(json.loads((folder / "meta.json").read_text())["tokens"].values())
    assert sum(map(len, appended)) <= n_tokens - 700


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("change", ["another shard size", "another corpus", "a damaged journal"])
def test_with_anything_else_it_starts_over(change, prepare, tmp_path, capsys):
    folder = interrupt(prepare, tmp_path / "new")
    if change == "another corpus":
        write_corpus(folder, Texts(["aa"], ["bb"]), "byte")
        assert (folder / "train.bin").read_bytes() == b"a\0a\0"
    else:
        if change == "a damaged journal":
            (folder / UNFINISHED / shards.JOURNAL).write_bytes(b"\0" * 50)
        size = 900 if change == "another shard size" else 700
        prepare(folder, size)
        prepare(tmp_path / "whole", size)
        assert contents(folder) == contents(tmp_path / "whole")
    assert ("starting over" in capsys.readouterr().out) == (change != "a damaged journal")
    assert not (folder / UNFINISHED).exists()


@pytest.mark.slow
@needs_fork
def test_unfinished_work_that_is_damaged_is_one_line(prepare, tmp_path):
    folder = interrupt(prepare, tmp_path / "new")
    for path in (folder / UNFINISHED).glob("train*.bin"):
        path.write_bytes(path.read_bytes()[:9])
    with pytest.raises(BadInput, match=r"train_000.bin is shorter than .* remove the folder .*prepare-unfinished"):
        prepare(folder)
    assert not (folder / "meta.json").exists()


@pytest.mark.slow
@needs_fork
def test_two_processes_do_not_write_to_one_folder(prepare, tmp_path):
    lock = tmp_path / "new" / UNFINISHED / shards.LOCK
    lock.parent.mkdir(parents=True)
    with holding(lock), pytest.raises(BadInput, match="by another process"):
        prepare(tmp_path / "new")
    prepare(tmp_path / "new")


# A process that watches for the journal may be too late on a busy machine.
KILLED = """
import os, runpy, signal, sys
from nanoladder.data.shards import Unfinished
save = Unfinished.save
Unfinished.save = lambda *args: save(*args) or os.kill(os.getpid(), signal.SIGKILL)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_prepare_script_goes_on_after_sigkill(tmp_path):
    """The command of a user, killed for real once its first shard is full."""
    with open(tmp_path / "x.jsonl", "w") as file:
        for number in range(20_000):
            file.write(json.dumps({"text": f"{number} " * 50}) + "\n")
    script = ROOT / "data" / "text" / "prepare.py"
    command = [script, "--input", tmp_path / "x.jsonl", "--tokenizer=byte", "--shard_tokens=500K"]
    whole, new = ([*command, f"--out_dir={tmp_path / name}"] for name in ("whole", "new"))
    assert python(*whole).returncode == 0
    assert python("-c", KILLED, *new).returncode == -signal.SIGKILL
    assert not (tmp_path / "new" / "meta.json").exists()
    done = python(*new)
    assert done.stdout.startswith("files read: 1") and done.stderr == ""
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")
