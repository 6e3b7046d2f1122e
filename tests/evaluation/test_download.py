"""Public task files are downloaded by torch.hub, whose failures are one line that says which file to put where."""

import urllib.error
from pathlib import Path

import pytest
import torch

import evaluate
from nanoladder.evaluation import PUBLIC


@pytest.fixture
def path(monkeypatch, tmp_path):
    """Where the task "lambada" then is to be."""
    path = tmp_path / "lambada" / "test.jsonl"
    monkeypatch.setitem(PUBLIC, "lambada", PUBLIC["lambada"]._replace(path=path))
    return path


def test_a_file_is_downloaded_and_checked_by_its_digest(path, run_main, monkeypatch):
    def fetch(url, path, digest, progress):
        assert (url, digest) == (PUBLIC["lambada"].url, PUBLIC["lambada"].sha256)
        Path(path).write_text("items")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    result = run_main(evaluate.main, "--download", "lambada")
    assert (result.code, result.err) == (0, "") and f"wrote {path}; --tasks lambada" in result.out


@pytest.mark.parametrize(
    "error, reason",
    [(RuntimeError("invalid hash value"), "is not the file"), (urllib.error.URLError("no network"), "(no network)")],
)
def test_a_download_that_fails_is_one_line(error, reason, path, refused, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    line = refused(evaluate.main, "--download", "lambada")
    assert reason in line and PUBLIC["lambada"].url in line and str(path) in line
