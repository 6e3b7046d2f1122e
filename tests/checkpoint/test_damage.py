"""Damaged and swapped checkpoints: refused with one line, or skipped for an older one."""

import collections
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import LOGGED, Call, replace, rows, same, saved, tiny, words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train
from nanoladder.checkpoint import format

CASES = 30
FILES = ["last.safetensors", "step_00000006.safetensors", "step_00000004.safetensors", "best.safetensors"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, dense):
    """A complete run of 8 steps, the same run after 6 steps, and one of another model."""
    folder = tmp_path_factory.mktemp("runs")
    keys = {"dataset": str(dense), "dropout": 0.2, "max_steps": 8, "save_interval": 2, "eval_interval": 2}
    whole = tiny(**keys, n_layer=1, eval_windows=2, out_dir=str(folder / "whole"))
    six = replace(whole, out_dir=str(folder / "six"), max_steps=6, lr_decay_steps=8)
    other = replace(whole, out_dir=str(folder / "other"), n_layer=2)
    for config in (whole, six, other):
        train.train(config)
    return whole, six, other


# -- damage

anywhere = st.one_of(st.integers(0, 10**9), st.integers(0, 400), st.integers(-1500, -1))  # modulo the size


def truncated(content, where):
    return content[: where % len(content)]


def flipped(content, where, bit):
    at = where % len(content)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def overwritten(content, where, patch):
    at = where % len(content)
    return content[:at] + patch + content[at + len(patch) :]


DAMAGES = st.one_of(
    st.tuples(st.just(truncated), anywhere),
    st.tuples(st.just(flipped), anywhere, st.integers(0, 7)),
    st.tuples(st.just(overwritten), anywhere, st.binary(min_size=1, max_size=40)),
    st.tuples(st.sampled_from(["empty", "missing", "another model's", *FILES[2:]])),
)


def damage(folder, name, other, how, *arguments):
    """Damages one file of a run."""
    path = folder / name
    sources = {"another model's": Path(other.out_dir, name)} | {file: folder / file for file in FILES}
    content = path.read_bytes() if path.exists() else b" "
    path.unlink(missing_ok=True)
    if callable(how):
        path.write_bytes(how(content, *arguments))
    elif how in sources and sources[how].exists():
        path.write_bytes(sources[how].read_bytes())
    elif how != "missing":
        path.write_bytes(b"")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_passed_over_or_harmless(runs, tmp_path, run_main):
    whole, six, other = runs
    outcomes = collections.Counter()
    expected = saved(whole)

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(FILES), DAMAGES, min_size=1), st.sampled_from(["resume", "auto"]))
    def attack(damages, init_from):
        folder = tmp_path / str(outcomes.total())
        shutil.copytree(six.out_dir, folder)
        for name, how in damages.items():
            damage(folder, name, other, *how)
        config = replace(whole, out_dir=str(folder), init_from=init_from)
        result = run_main(train.main, *words(config))
        if result.code == 2:
            assert result.err.startswith("error: ") and result.err.count("\n") == 1
            # The next checkpoint may be another model's: the damage is then reported before the refusal.
            assert all(line.startswith("warning: ") for line in result.out.splitlines())
            outcomes["refused"] += 1
        else:
            assert result.code == 0 and "Traceback" not in result.err
            assert rows(config, *LOGGED) == rows(whole, *LOGGED)
            found = saved(config)
            assert all(same(found[part], expected[part]) for part in ("model", "optimizer", "generators", "progress"))
            outcomes["fallen back" if "is damaged" in result.out else "loaded"] += 1
        shutil.rmtree(folder)

    attack()
    print(dict(outcomes))
    assert outcomes.total() >= CASES and min(outcomes.values()) >= 2 and len(outcomes) == 3


@pytest.mark.parametrize("where", [-1, -2000, 600])
def test_a_flipped_bit_in_a_tensor_or_in_the_metadata_is_found(where, runs, tmp_path, run_main):
    """The library of safetensors reads such a file without an error."""
    _, six, _ = runs
    folder = shutil.copytree(six.out_dir, tmp_path / "run")
    path = folder / "last.safetensors"
    path.write_bytes(flipped(path.read_bytes(), where, 0))
    result = run_main(train.main, f"--out_dir={folder}", "--init_from=resume", "--max_steps=6")
    assert result.code == 0 and f"{path} is damaged" in result.out and "step_00000006" in result.out


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), PermissionError(13, "denied"), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over_for_an_older_one(error, runs, refused, monkeypatch):
    _, six, _ = runs

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(format, "read_tensors", fail)
    line = refused(train.main, f"--out_dir={six.out_dir}", "--init_from=resume", "--max_steps=8")
    assert f"{six.out_dir}/last.safetensors cannot be read (" in line and "damaged" not in line


@pytest.mark.parametrize("name", ["last.safetensors", "x.pt"])
def test_a_pickle_is_refused_and_not_executed(name, runs, tmp_path, refused):
    _, six, _ = runs
    call = Call(tmp_path / "executed")
    for save in (lambda path: path.write_bytes(pickle.dumps(call)), partial(torch.save, call)):
        save(tmp_path / name)
        config = replace(six, out_dir=str(tmp_path), init_from=str(tmp_path / name))
        assert f"{name} is damaged or not" in refused(train.main, *words(config))
        assert not (tmp_path / "executed").exists()
