"""An interrupted preparation resumes, and ends with the same files."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from conftest import contents
from tqdm import tqdm

from nanoladder import files
from nanoladder.errors import BadInput
from nanoladder.prepare import corpus, encode, resume, writer
from nanoladder.prepare.corpus import Texts
from nanoladder.prepare.resume import JOURNAL, UNFINISHED, SplitFiles
from nanoladder.prepare.sources import Files, find_text
from nanoladder.prepare.writer import write_corpus

RNG = random.Random(0)
TEXTS = ["".join(RNG.choices("abcde ", k=RNG.choice([2, 9, 50, 400]))) for _ in range(90)]  # in one block or several
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")


def killed_at(event, function, *arguments):
    """Calls a function in a process that gets SIGKILL right before the writer's `event`-th file operation, from 1.

    Returns True if the function finished first.
    """

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

        for name in ("fsync", "replace"):
            setattr(os, name, counting(getattr(os, name)))
        Path.unlink = counting(Path.unlink)
        resume.open_cut_back = counting(resume.open_cut_back)
        SplitFiles.append = counting(flushed(SplitFiles.append))
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def flushed(append):
    """Wraps SplitFiles.append to leave nothing in Python's buffers, as happens with more than a few ids."""

    def append_and_flush(self, *args):
        append(self, *args)
        self.ids.flush()
        self.index.flush()

    return append_and_flush


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """prepare(folder) writes a dataset over an older one, and saves its journal often."""
    for module in (corpus, encode):
        monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(encode, "n_cores", lambda: 2)
    monkeypatch.setattr(writer, "JOURNAL_TOKENS", 700)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread could hold a lock while a process is forked
    if tqdm.monitor:
        tqdm.monitor.exit()
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join(TEXTS))
    files = [find_text(tmp_path / f"{name}.txt") for name in "ab"]

    def prepare(folder, tokenizer="byte", overwrite=False):
        write_corpus(folder, Files(files, "lines", 0.4), tokenizer, {}, documents=True, overwrite=overwrite)

    return prepare


@pytest.fixture
def expected(prepare, tmp_path):
    """The files of an uninterrupted preparation."""
    prepare(tmp_path / "whole")
    return contents(tmp_path / "whole")


def interrupt(prepare, folder):
    """Kills a preparation after its first journal."""
    for event in range(10, 1000, 10):
        assert not killed_at(event, prepare, folder)
        if (folder / UNFINISHED / JOURNAL).exists():
            return folder


@pytest.mark.slow
@needs_fork
def test_a_preparation_killed_at_any_instant_resumes_to_the_same_files(prepare, expected, tmp_path):
    write_corpus(tmp_path / "old", Texts(["old"] * 9, ["dataset"]), "byte")
    old, seen = contents(tmp_path / "old"), []
    for event in range(1, 10_000, 17):
        folder = shutil.copytree(tmp_path / "old", tmp_path / "new")
        if killed_at(event, prepare, folder, "byte", True):
            break
        visible = {name: content for name, content in contents(folder).items() if UNFINISHED not in name}
        seen.append("meta.json" in visible)
        assert visible in (old, expected) or "meta.json" not in visible
        prepare(folder, overwrite=visible == old)
        assert contents(folder) == expected
        shutil.rmtree(folder)
    assert len(seen) > 12


@pytest.mark.slow
@needs_fork
def test_a_preparation_resumes_from_the_last_journal(prepare, expected, tmp_path, monkeypatch):
    folder = interrupt(prepare, tmp_path / "new")
    n_appended, append = [], SplitFiles.append

    def counted(self, piece, ids, *rest):
        n_appended.append(len(ids))
        append(self, piece, ids, *rest)

    monkeypatch.setattr(SplitFiles, "append", counted)
    prepare(folder)
    assert contents(folder) == expected
    assert sum(n_appended) <= sum(json.loads(expected["meta.json"])["tokens"].values()) - 700


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("change", ["another tokenizer", "a damaged journal"])
def test_another_tokenizer_with_overwrite_or_a_damaged_journal_starts_over(change, prepare, tmp_path):
    folder = interrupt(prepare, tmp_path / "new")
    tokenizer = "char" if change == "another tokenizer" else "byte"
    if change == "a damaged journal":
        (folder / UNFINISHED / JOURNAL).write_bytes(b"\0" * 50)
    else:
        before = contents(folder)
        with pytest.raises(BadInput, match=r"unfinished work on another text .* --overwrite"):
            prepare(folder, tokenizer)
        assert contents(folder) == before
    prepare(folder, tokenizer, overwrite=tokenizer == "char")
    prepare(tmp_path / "whole", tokenizer)
    assert contents(folder) == contents(tmp_path / "whole")
    assert not (folder / UNFINISHED).exists()


@pytest.mark.slow
@needs_fork
def test_damaged_unfinished_work_is_refused_in_one_line(prepare, tmp_path):
    folder = interrupt(prepare, tmp_path / "new")
    os.truncate(folder / UNFINISHED / "train.bin", 9)
    with pytest.raises(BadInput, match=r"train.bin is shorter than .* remove the folder .*prepare-unfinished"):
        prepare(folder)
    assert not (folder / "meta.json").exists()


def test_two_processes_do_not_write_to_one_folder(prepare, tmp_path, monkeypatch):
    def held(path):
        raise BlockingIOError

    with monkeypatch.context() as patch, pytest.raises(BadInput, match="by another process"):
        patch.setattr(files, "hold", held)
        prepare(tmp_path / "new")
    prepare(tmp_path / "new")
