"""File writes are atomic: afterwards the file is either the complete new one or the old one."""

import os

import pytest

from nanoladder import files


@pytest.mark.parametrize("content", [b"new", "new", lambda file: file.write(b"new")])
def test_a_file_is_written_from_bytes_text_or_by_a_function(content, tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    files.write(tmp_path / "x", content)
    assert (tmp_path / "x").read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("failing", ["fsync", "replace", "content"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(failing, tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    if failing != "content":
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space"):
        files.write(tmp_path / "x", fail if failing == "content" else b"new")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_the_file_and_then_its_folder_reach_the_disk(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.readlink(f"/proc/self/fd/{file}")))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: events.append("replace") or replace(*names))
    files.write(tmp_path / "x", b"new")
    assert os.path.basename(events[0]).startswith(".x.") and events[1:] == ["replace", str(tmp_path)]


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_replaces_an_existing_file(links, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "x").write_bytes(b"new")
    (tmp_path / "y").write_bytes(b"old")
    for _ in range(2):  # the second time they may already be one file
        files.link(tmp_path / "x", tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == b"new" and sorted(os.listdir(tmp_path)) == ["x", "y"]
    assert os.path.samefile(tmp_path / "x", tmp_path / "y") == links


def test_only_our_temporary_files_are_removed(tmp_path):
    for name in (".last.safetensors.123.tmp", ".hidden", "x.tmp", "last.safetensors"):
        (tmp_path / name).write_bytes(b"")
    files.remove_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "last.safetensors", "x.tmp"]
