"""Encoding in processes: the same ids, and processes that never stay behind."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from nanoladder.entry import run_script

import numpy as np
import pytest
from conftest import ROOT

from nanoladder.data import encode, encode_worker
from nanoladder.data.corpus import Corpus, Texts
from nanoladder.data.encode import SMALL, Worker, encoded
from nanoladder.data.shards import JOURNAL, UNFINISHED
from nanoladder.data.tokenizer import END_OF_TEXT, build_tokenizer, make_encoding
from nanoladder.data.writer import write_corpus
from nanoladder.errors import BadInput

RNG = random.Random(0)
TEXTS = [" ".join(RNG.choices(["naïve", "<|endoftext|>", "☕\n", "", "a cat"], k=50)) for _ in range(40)]
DTYPE = np.dtype("<u2")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Makes each text here a chunk of its own."""
    monkeypatch.setattr(encode, "BLOCK", 10)


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, a list."""
    processes, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: processes.append(start(*args, **kwargs)) or processes[-1]
    )
    return processes


def ids_of(texts, tokenizer="byte", workers=None):
    """[(ids, UTF-8 bytes)] of the texts."""
    pieces = encoded(Texts(texts, []), None, build_tokenizer(tokenizer, texts), DTYPE, workers)
    return [(ids.tolist(), n_bytes) for _, encodings in pieces for ids, n_bytes in encodings]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_processes_give_the_ids_of_the_texts_in_order(tokenizer, started):
    encoding = build_tokenizer(tokenizer, TEXTS)
    expected = [(encoding.encode_ordinary(text), len(text.encode())) for text in TEXTS]
    assert ids_of(TEXTS, tokenizer, workers=1) == expected and not started
    assert ids_of(TEXTS, tokenizer, workers=3) == expected and len(started) == 3
    assert all(process.returncode is not None for process in started)


@pytest.mark.slow
def test_processes_know_the_ranks_and_take_special_tokens_for_text(started):
    tokens = [bytes([value]) for value in range(256)] + [b"a ", b"a c"]
    encoding = make_encoding("bpe", r"a cat|[\s\S]", tokens, {END_OF_TEXT: 258})
    found = [ids.tolist() for _, parts in encoded(Texts(TEXTS, []), None, encoding, DTYPE, 2) for ids, _ in parts]
    assert found == [encoding.encode_ordinary(text) for text in TEXTS] and 257 in found[0] and len(started) == 2


def test_a_small_corpus_needs_no_process(started):
    assert len(ids_of(TEXTS[:SMALL], workers=2)) == SMALL and not started
    assert len(ids_of(TEXTS[: SMALL + 1], workers=2)) == SMALL + 1 and len(started) == 2


@pytest.mark.slow
def test_an_unknown_character_is_one_line_with_processes_too(started):
    with pytest.raises(BadInput, match=r"character 'q' .*: not one of"):
        list(encoded(Texts([*TEXTS, "q"], []), None, build_tokenizer("char", TEXTS), DTYPE, 2))
    assert len(started) == 2 and all(process.returncode is not None for process in started)


@pytest.mark.slow
def test_an_end_before_the_end_of_the_corpus_ends_the_processes(started):
    parts = encoded(Texts(TEXTS, []), None, build_tokenizer("byte"), DTYPE, 2)
    next(parts)
    assert [process.poll() for process in started] == [None, None]
    parts.close()
    assert all(process.returncode is not None for process in started)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_process_that_dies_is_one_line_and_the_work_goes_on(before, started, monkeypatch, tmp_path):
    """Its process is killed before it gets the texts, or right after."""
    arguments = Texts(TEXTS[1:], TEXTS[:1]), "byte"
    write_corpus(tmp_path / "whole", *arguments, shard_tokens=1000)
    n_encoded, encode_here, load = count(), Worker.encode, encode.pickle.load

    def die(self):
        if next(n_encoded) == 25:
            self.process.kill()

    def dying(self, texts):
        if before:
            die(self)
        else:
            monkeypatch.setattr(encode.pickle, "load", lambda file: die(self) or load(file))
        return encode_here(self, texts)

    with monkeypatch.context() as patch, pytest.raises(BadInput) as caught:
        patch.setattr(Worker, "encode", dying)
        write_corpus(tmp_path / "new", *arguments, shard_tokens=1000, workers=2)
    line = str(caught.value)
    assert "\n" not in line and "has died (exit code -9)" in line and "the same command" in line
    assert all(process.returncode is not None for process in started)
    assert (tmp_path / "new" / UNFINISHED / JOURNAL).exists()
    monkeypatch.setattr(encode.pickle, "load", load)
    write_corpus(tmp_path / "new", *arguments, shard_tokens=1000, workers=2)
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")


def test_processes_that_cannot_be_started_are_one_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BadInput, match="cannot start a process"):
        ids_of(TEXTS, workers=2)


@pytest.mark.slow
def test_a_process_imports_neither_ours_nor_pytorch_and_ends_with_its_stdin():
    command = [sys.executable, "-X", "importtime", "-P", encode_worker.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == ""
    assert "tiktoken" in done.stderr and "torch" not in done.stderr and "nanoladder" not in done.stderr


# -- the end of the main process


class Endless(Corpus):
    """Documents without an end."""

    identity = "endless"

    def documents(self, place):
        for number in count(place or 0):
            self.place, self.following = number, number + 1
            yield ("train" if number else "val"), [f"{number} " * 10_000]


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    """True if there is such a process, other than a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_survives_the_main_one(number, tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    path = tmp_path / UNFINISHED / "train_000.bin"
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    children = children_of(process.pid)
    assert len(children) == 3
    os.killpg(process.pid, number)  # a terminal sends Ctrl-C to the whole group
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()  # else its endless corpus fills the disk
    assert stderr == ("interrupted\n" if number == signal.SIGINT else "")
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    until = time.monotonic() + 60
    while any(map(alive, children)):
        assert time.monotonic() < until
        time.sleep(0.01)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
    run_script(lambda argv: write_corpus(argv[0], Endless(), "byte", workers=3))
