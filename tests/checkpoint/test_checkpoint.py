import contextlib
import hashlib
import json
import math
import os
import shutil
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import flags, replace, rows, same, saved, tiny, weights

import train
from model import GPT
from nanoladder import checkpoint
from nanoladder.config import Config
from nanoladder.run import metrics

LOGGED = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr", "grad_norm"


class PowerCut(Exception):
    pass


@contextlib.contextmanager
def stopped_at(step):
    """Training in here ends abruptly once it has logged a row of that step or later."""
    original = metrics.Metrics.write

    def log(self, row):
        original(self, row)
        if row["step"] >= step:
            raise PowerCut

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(metrics.Metrics, "write", log)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, dense):
    """A finished run of 6 steps, saved at 2, 4 and 6. Not to be written to."""
    config = tiny(dataset=str(dense), out_dir=str(tmp_path_factory.mktemp("trained")), save_interval=2)
    train.train(config)
    return config


@pytest.fixture
def copy(trained, tmp_path):
    """The finished run, copied to be changed."""
    out_dir = tmp_path / "copy"
    shutil.copytree(trained.out_dir, out_dir)
    return replace(trained, out_dir=str(out_dir))


def words(config, **overrides):
    """The command line of a run like config's."""
    return flags(**{"dataset": config.dataset, "out_dir": config.out_dir, "save_interval": 2, **overrides})


# -- resuming


@pytest.mark.parametrize("kind", ["dense", "documents"])
@pytest.mark.parametrize("n, init_from", [(7, "resume"), (10, "auto")])
def test_train_stop_resume_equals_one_run_bit_for_bit(kind, n, init_from, request, tmp_path):
    dataset = str(request.getfixturevalue(kind))
    # 7 ends no interval of the log; the last row before the stop comes from after the checkpoint.
    options = {"dataset": dataset, "max_steps": 17, "log_interval": 3, "eval_interval": 4, "save_interval": n}
    one = tiny(**options, out_dir=str(tmp_path / "one"), dropout=0.2)
    two = replace(one, out_dir=str(tmp_path / "two"), init_from=init_from)
    train.train(one)
    with stopped_at(n + 1):
        train.train(replace(two, init_from="auto"))
    assert rows(two)[-1]["step"] > n == saved(two)["progress"]["step"]
    torch.manual_seed(99)  # whatever the generators were, they come from the checkpoint
    train.train(two)
    assert rows(two, *LOGGED) == rows(one, *LOGGED)
    assert [row["step"] for row in rows(two)] == [3, 4, 6, 8, 9, 12, 15, 16, 17]
    for name in ("last", "best"):
        ours, theirs = saved(two, name), saved(one, name)
        for part in ("model", "optimizer", "generators", "progress"):
            assert same(ours[part], theirs[part]), (name, part)


def test_a_longer_run_continues_where_the_shorter_one_ended(copy, run_main):
    result = run_main(train.main, *words(copy, init_from="resume", max_steps=9))
    assert result.code == 0
    assert [row["step"] for row in rows(copy)] == list(range(1, 10)) and saved(copy)["progress"]["step"] == 9


def test_resuming_a_finished_run_says_so_and_changes_nothing(copy, run_main):
    before = Path(copy.out_dir, "last.safetensors").read_bytes(), rows(copy)
    result = run_main(train.main, *words(copy, init_from="resume"))
    assert result.code == 0 and "nothing is left to train" in result.out
    assert (Path(copy.out_dir, "last.safetensors").read_bytes(), rows(copy)) == before


def test_a_metrics_file_cut_off_in_a_line_is_mended(copy, run_main):
    path = Path(copy.out_dir, "metrics.jsonl")
    path.write_text(path.read_text()[:-20])
    run_main(train.main, *words(copy, init_from="resume", max_steps=8))
    assert [row["step"] for row in rows(copy)] == [1, 2, 3, 4, 5, 7, 8]


def test_resume_needs_a_run(trained, tmp_path, refused):
    line = refused(train.main, *words(trained, out_dir=tmp_path / "new", init_from="resume"))
    assert "last.safetensors" in line and not (tmp_path / "new").exists()


@pytest.mark.parametrize("init_from", ["scratch", "PATH"])
def test_a_new_run_does_not_replace_another(init_from, trained, copy, refused):
    init_from = init_from.replace("PATH", f"{trained.out_dir}/last.safetensors")
    given = words(copy, seed=2, eval_interval=0, init_from=init_from)
    files = {path: path.read_bytes() for path in Path(copy.out_dir).iterdir()}
    line = refused(train.main, *given)
    assert "--init_from=resume" in line and "delete the folder" in line
    assert files == {path: path.read_bytes() for path in Path(copy.out_dir).iterdir()}


def test_a_run_stopped_before_its_first_last_checkpoint_is_not_lost(dense, tmp_path, refused):
    config = tiny(dataset=str(dense), out_dir=str(tmp_path), eval_interval=2)
    with stopped_at(3):
        train.train(config)
    before = (tmp_path / "best.safetensors").read_bytes()
    refused(train.main, *words(config))
    assert (tmp_path / "best.safetensors").read_bytes() == before


def test_resuming_needs_the_same_context(copy, refused):
    line = refused(train.main, *words(copy, init_from="resume", context_length=8))
    assert "context_length=16" in line and "--init_from=" in line


# -- saving


def test_any_tool_for_safetensors_reads_a_checkpoint(trained):
    """What the docstring of nanoladder/checkpoint says a file holds, read by the library alone."""
    path = Path(trained.out_dir, "last.safetensors")
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = {key: json.loads(text) for key, text in file.metadata().items() if key != "sha256"}
    expected = {"format_version", "config", "tokenizer", "progress", "scaler", "optimizer", "generators"}
    assert metadata.keys() == expected
    assert metadata["format_version"] == 4 and metadata["progress"]["step"] == 6 and metadata["scaler"] == {}
    ranks = Path(trained.out_dir, "tokenizer.tiktoken").read_bytes()
    assert metadata["tokenizer"] == {"sha256": hashlib.sha256(ranks).hexdigest()}
    model = GPT(Config(**metadata["config"]))
    names = dict(model.named_parameters()).keys()
    states = {f"optimizer/{name}/{state}" for name in names for state in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == names | states | {"generators/cpu"}
    assert all(tensor.is_contiguous() and tensor.data_ptr() % tensor.itemsize == 0 for tensor in tensors.values())
    missing, unexpected = model.load_state_dict({name: tensors[name] for name in names}, strict=False)
    assert missing == ["head.weight"] and not unexpected  # tied: it has the embedding's
    assert same(model.state_dict(), weights(trained))


VALUES = [
    *(True, False, None, 3, -(2**70), 2.0, 0.1, 1e-300, math.inf),
    *("text", "naïve ☕\n", {"part": 1.0, "more": False}),
]


def test_values_and_tensors_of_any_type_come_back_as_they_were(trained, tmp_path):
    state, path = saved(trained), tmp_path / "x.safetensors"
    dtypes = checkpoint.format.DTYPES
    values = {f"value{n}": value for n, value in enumerate(VALUES)}
    values |= {f"tensor{n}": torch.arange(-3, 3).to(dtype).reshape(2, 3) for n, dtype in enumerate(dtypes)}
    values |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5), "transposed": torch.rand(3, 5).T}
    values |= {"parts": {"codes": torch.arange(7, dtype=torch.uint8), "signed": True}, "empty": {}}
    state["optimizer"] = {"norm.weight": values, "token_embedding.weight": {}}
    checkpoint.write_file(path, state)
    assert same(checkpoint.load(path), state)
    found = checkpoint.load(path)["optimizer"]["norm.weight"]
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in values.items()}
    assert all(found[f"tensor{n}"].dtype == dtype for n, dtype in enumerate(dtypes))


def test_a_checkpoint_may_be_read_by_whom_the_umask_lets(trained):
    expected = Path(trained.out_dir, "metrics.jsonl").stat().st_mode
    assert Path(trained.out_dir, "last.safetensors").stat().st_mode == expected


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_loaded_checkpoint_takes_no_memory(trained):
    """Its tensors lie in the mapped file."""
    path = Path(trained.out_dir, "last.safetensors")
    state = checkpoint.load(path)
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    spans = [[int(end, 16) for end in ends.split("-")] for ends in mapped]
    tensors = [*state["model"].values(), *state["generators"].values(), *state["optimizer"]["norm.weight"].values()]
    assert all(any(begin <= tensor.data_ptr() < end for begin, end in spans) for tensor in tensors)


def test_bytes_moved_by_another_tool_leave_a_checkpoint_whole(trained, tmp_path):
    """The digest covers what a file says, not where it says it."""
    path, other = Path(trained.out_dir, "last.safetensors"), tmp_path / "x.safetensors"
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(safetensors.torch.load_file(path), other, metadata)
    assert same(checkpoint.load(other), saved(trained))
    safetensors.torch.save_file(safetensors.torch.load_file(path), other, metadata | {"progress": "{}"})
    with pytest.raises(checkpoint.Damaged, match="SHA-256"):
        checkpoint.load(other)


@pytest.mark.parametrize("failing", ["serialize", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_checkpoint_whole(failing, dense, tmp_path, monkeypatch, capsys):
    config = tiny(dataset=str(dense), out_dir=str(tmp_path), save_interval=2)
    train.train(replace(config, max_steps=4, lr_decay_steps=6))

    serialize = checkpoint.save.serialize
    original = {"serialize": serialize, "fsync": os.fsync, "replace": os.replace}[failing]

    def fail(*arguments, **options):
        if threading.current_thread() is threading.main_thread():  # a file of the report's
            return original(*arguments, **options)
        if failing == "serialize":
            arguments[1].write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.save if failing == "serialize" else os, failing, fail)
        with pytest.raises(SystemExit, match=r"lacks last\.safetensors of step 6"):
            train.train(replace(config, init_from="resume"))
    assert saved(config)["progress"]["step"] == 4 and not list(tmp_path.glob(".*.tmp"))
    assert "warning: the checkpoint of step 6 is not saved: [Errno 28]" in capsys.readouterr().err
    train.train(replace(config, init_from="resume"))
    assert saved(config)["progress"]["step"] == 6


# -- files that are not checkpoints of ours


DAMAGE = {
    "nothing": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "another program's": lambda path: safetensors.torch.save_file({"x": torch.ones(3)}, path, {"format": "pt"}),
    "another version's": lambda path: checkpoint.write_file(path, {**checkpoint.load(path), "format_version": 3}),
}


@pytest.mark.parametrize("how", ["resume", "PATH"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_no_checkpoint_of_ours_is_refused(damage, how, copy, tmp_path, refused):
    path = Path(copy.out_dir, "last.safetensors")
    for older in path.parent.glob("step_*.safetensors"):
        older.unlink()
    DAMAGE[damage](path)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    given = {"init_from": "resume"} if how == "resume" else {"init_from": path, "out_dir": tmp_path / "new"}
    assert str(path) in refused(train.main, *words(copy, **given))
    assert files == {file: file.read_bytes() for file in tmp_path.rglob("*.*")}  # nothing written


@pytest.mark.parametrize("path", ["nowhere/last.safetensors", "."])
def test_a_checkpoint_that_is_not_there(path, trained, tmp_path, refused):
    line = refused(train.main, *words(trained, init_from=path, out_dir=tmp_path / "new"))
    assert "no checkpoint at" in line and not (tmp_path / "new").exists()


# -- starting from another run's weights


def test_init_from_a_path_takes_the_weights_and_nothing_else(trained, tmp_path):
    other = replace(
        trained,
        out_dir=str(tmp_path / "new"),
        init_from=f"{trained.out_dir}/last.safetensors",
        max_steps=1,
        warmup_steps=0,
        learning_rate=0.0,
        min_lr=0.0,
    )
    train.train(other)
    assert same(weights(other), weights(trained))  # a step at learning rate 0
    assert [row["step"] for row in rows(other)] == [1]
    steps = {float(state["step"]) for state in saved(other)["optimizer"].values()}
    assert steps == {1.0}  # the optimizer began anew


def test_a_shorter_context_takes_the_first_positions(trained, tmp_path):
    shorter = replace(
        trained,
        out_dir=str(tmp_path / "new"),
        init_from=f"{trained.out_dir}/last.safetensors",
        context_length=5,
        max_steps=1,
        learning_rate=0.0,
        min_lr=0.0,
    )
    train.train(shorter)
    ours, theirs = weights(shorter), weights(trained)
    name = "position_embedding.weight"
    assert torch.equal(ours.pop(name), theirs.pop(name)[:5]) and same(ours, theirs)
    config = replace(trained, vocab_size=saved(trained)["config"]["vocab_size"])
    models = GPT(config).eval(), GPT(replace(config, context_length=5)).eval()
    for model in models:
        checkpoint.load_weights(model, checkpoint.load(f"{trained.out_dir}/last.safetensors"), "last.safetensors")
    inputs = torch.arange(5)[None]
    torch.testing.assert_close(models[0].logits(inputs), models[1].logits(inputs))


SHAPES = [
    ({"context_length": 17}, "--context_length=16"),
    ({"n_layer": 3}, "n_layer=2"),
    ({"n_layer": 1}, "n_layer=2"),
    ({"n_embd": 64}, "n_embd=32"),
    ({"n_head": 4}, "n_head=2"),
    ({"bias": True}, "bias=False"),
    ({"vocab_size": 99}, "vocab_size=17"),
]


@pytest.mark.parametrize("how", ["resume", "PATH"])
def test_a_model_of_another_shape_is_refused_by_key(how, trained, tmp_path, refused):
    path = Path(trained.out_dir, "last.safetensors")
    start = {"init_from": "resume"} if how == "resume" else {"init_from": path, "out_dir": tmp_path / "new"}
    for given, expected in SHAPES[how == "resume" :]:  # resuming allows no other context at all
        line = refused(train.main, *words(trained, **start, **given))
        assert str(path) in line and expected in line, line
    assert not (tmp_path / "new").exists()


def test_another_optimizers_state_is_refused(copy, refused):
    assert "optimizer=adamw" in refused(train.main, *words(copy, init_from="resume", max_steps=8, optimizer="sgd"))
