"""Token files are verified in full once; later runs verify only files that have changed."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, flags, tiny, write_folder, write_meta

import train
from nanoladder import parallel
from nanoladder.data import checks, open_dataset
from nanoladder.errors import BadInput

SIZE = 2**25  # bytes of train.bin: eight times what a sample reads
GAP = (SIZE - checks.BLOCK) // (checks.BLOCKS - 1)  # from one sampled block to the next
UNSEEN = 20 * GAP + GAP // 2  # a byte that no sample reads
KINDS = {
    "an empty file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a broken link": lambda path: path.symlink_to("nowhere"),
    **{
        f"the text {text[:20]}": lambda path, text=text: path.write_text(text)
        for text in ("7", "[]", "{", '{"train.bin": 7}', '{"train.bin": {"size": 1}}', "[" * 100_000)
    },
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "large", np.zeros(SIZE // 2, np.uint16), [1] * 999, 2)


@pytest.fixture
def folder(prepared, tmp_path):
    """A large dataset that was never opened."""
    return shutil.copytree(prepared, tmp_path / "large")


@pytest.fixture
def scanned(monkeypatch):
    """List of the names of the files that are read whole, added to as it happens."""
    names, scan = [], checks.scan
    monkeypatch.setattr(checks, "scan", lambda path, dtype: names.append(path.name) or scan(path, dtype))
    return names


def start(folder, **keys):
    return open_dataset(tiny(dataset=str(folder), **keys))


def overwrite(path, place, content=b"\1"):
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


def bytes_read():
    """Bytes that this process has read so far, from disks or the page cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts in /proc/self/io, which Linux has")
def test_a_second_start_reads_a_bounded_number_of_bytes(folder):
    counts = [bytes_read()]
    for keys in ({}, {}, {"verify_data": True}, {}):
        start(folder, **keys)
        counts.append(bytes_read())
    first, second, verifying, last = np.diff(counts)
    assert first > SIZE and verifying > SIZE
    assert second == pytest.approx(last, abs=1000) and second < checks.BLOCKS * checks.BLOCK + 100_000


def test_files_are_read_whole_once(folder, scanned):
    for _ in range(3):
        start(folder)
    assert scanned == ["train.bin", "val.bin"]
    start(folder, verify_data=True)
    assert scanned == 2 * ["train.bin", "val.bin"]


def test_the_command_line_can_ask_for_the_full_check(dense, tmp_path, scanned):
    keys = {"dataset": dense, "out_dir": tmp_path / "out", "max_steps": 1}
    train.main(flags(**keys))
    scanned.clear()
    train.main(flags(**keys, overwrite=True))
    assert scanned == []
    train.main(flags(**keys, overwrite=True, verify_data=True))
    assert scanned == ["train.bin", "val.bin"]


def test_a_file_that_changed_is_read_again_and_refused(folder, scanned):
    start(folder)
    overwrite(folder / "train.bin", UNSEEN)
    for _ in range(2):
        with pytest.raises(BadInput, match="another SHA-256"):
            start(folder)
    assert scanned == ["train.bin", "val.bin", "train.bin", "train.bin"]


def test_setting_the_modification_time_back_hides_nothing(folder):
    start(folder)
    status = (folder / "train.bin").stat()
    overwrite(folder / "train.bin", UNSEEN)
    os.utime(folder / "train.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(BadInput, match="another SHA-256"):
        start(folder)


def test_a_copy_is_checked_for_itself(folder, tmp_path, scanned):
    """The copy has the same modification times, and the record of the check comes with it."""
    start(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert (copy / checks.VERIFIED).exists()
    start(copy)
    assert scanned == 2 * ["train.bin", "val.bin"]


def damage_silently(folder, place, length=1):
    """Does as a failing disk: changes bytes but neither the size nor the remembered times."""
    path = folder / "train.bin"
    overwrite(path, place, b"\1" * length)
    memory = json.loads((folder / checks.VERIFIED).read_text())
    memory["train.bin"] |= {"modified_ns": path.stat().st_mtime_ns, "changed_ns": path.stat().st_ctime_ns}
    (folder / checks.VERIFIED).write_text(json.dumps(memory))


@pytest.mark.parametrize("place, length", [(0, 1), (SIZE - 1, 1), (100 * GAP + 200, 1), (UNSEEN, GAP)])
def test_silent_damage_is_found_in_a_sampled_block(place, length, folder):
    start(folder)
    damage_silently(folder, place, length)
    with pytest.raises(BadInput, match="another SHA-256"):
        start(folder)


def test_silent_damage_between_the_sampled_blocks_is_found_by_verify_data_alone(folder):
    """States the limit that the docstring of checks.py tells."""
    start(folder)
    damage_silently(folder, UNSEEN)
    start(folder)
    with pytest.raises(BadInput, match="another SHA-256"):
        start(folder, verify_data=True)


@pytest.mark.parametrize("size", [0, 1, checks.BLOCK, checks.BLOCK + 1, 2**22 - 1, 2**22])
def test_a_sample_of_a_small_file_is_all_of_it(size, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    whole = checks.sample(path)
    for place in {0, 1, size // 3, size - 2, size - 1} & set(range(size)):
        overwrite(path, place)
        assert checks.sample(path) != whole
        overwrite(path, place, b"\0")
    assert checks.sample(path) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_memory_is_no_memory_and_no_error(kind, dense, tmp_path, scanned):
    folder = shutil.copytree(dense, tmp_path / "dense")
    (folder / checks.VERIFIED).unlink(missing_ok=True)
    KINDS[kind](folder / checks.VERIFIED)
    start(folder)
    assert scanned == ["train.bin", "val.bin"]


def test_a_folder_that_cannot_be_written_is_checked_each_time(dense, tmp_path, scanned):
    folder = shutil.copytree(dense, tmp_path / "dense")
    (folder / checks.VERIFIED).unlink(missing_ok=True)
    (folder / checks.VERIFIED).mkdir()  # root may write in any folder, but not over this
    for _ in range(2):
        start(folder)
    assert scanned == 2 * ["train.bin", "val.bin"]
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))


def test_what_is_remembered_is_held_against_the_meta_json_of_today(dense, tmp_path, scanned):
    folder = shutil.copytree(dense, tmp_path / "dense")
    start(folder)
    meta = json.loads((folder / "meta.json").read_text())
    digests = meta["sha256"] | {"val.bin": "0" * 64}
    for changes, named in [({"vocab_size": 5}, "token id"), ({"sha256": digests}, "val.bin is not the file")]:
        write_meta(folder, meta | changes)
        with pytest.raises(BadInput, match=named):
            start(folder)
    assert scanned == ["train.bin", "val.bin"]


def test_a_folder_made_by_nanogpt_is_remembered_with_its_largest_id(tmp_path, scanned):
    for name in ("train", "val"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    for _ in range(2):
        start(tmp_path, vocab_size=100)
    with pytest.raises(BadInput, match="token id 99, beyond vocab_size=99"):
        start(tmp_path, vocab_size=99)
    assert scanned == ["train.bin", "val.bin"]


def test_of_several_processes_the_first_one_reads_the_files_for_all(folder, scanned, monkeypatch):
    monkeypatch.setattr(parallel, "broadcast_from_first", lambda make: None)  # the first process found nothing
    start(folder)
    assert scanned == []
    monkeypatch.setattr(parallel, "broadcast_from_first", lambda make: "train.bin is not the file")
    with pytest.raises(BadInput, match=r"train\.bin is not the file"):
        start(folder)


def test_git_does_not_see_the_memory_of_a_check():
    assert f"/data/*/{checks.VERIFIED}" in (ROOT / ".gitignore").read_text().splitlines()
