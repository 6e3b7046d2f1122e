import contextlib
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import LOGGED, assert_same_state, flags, replace, rows, same, saved, tiny, weights, write_state

import train
from model import GPT
from nanoladder import checkpoint
from nanoladder.checkpoint import format
from nanoladder.config import Config
from nanoladder.run import metrics


class PowerCut(Exception):
    pass


@contextlib.contextmanager
def stopped_at(step):
    """Context in which training ends abruptly once it has logged a row of this step or a later one."""
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
    """A finished run of 6 steps, saved at 2, 4 and 6. Read-only."""
    config = tiny(dataset=str(dense), out_dir=str(tmp_path_factory.mktemp("trained")), save_interval=2)
    train.train(config)
    return config


@pytest.fixture
def copy(trained, tmp_path):
    """A writable copy of the finished run."""
    out_dir = tmp_path / "copy"
    shutil.copytree(trained.out_dir, out_dir)
    return replace(trained, out_dir=str(out_dir))


def words(config, **overrides):
    """The command line of a run like config's."""
    return flags(**{"dataset": config.dataset, "out_dir": config.out_dir, "save_interval": 2, **overrides})


# -- resuming


@pytest.mark.parametrize("kind, n, init_from", [("dense", 7, "resume"), ("documents", 10, "auto")])
def test_train_stop_resume_equals_one_run_bit_for_bit(kind, n, init_from, request, tmp_path):
    dataset = str(request.getfixturevalue(kind))
    # 7 ends no interval of the log; the last row before the stop is later than the checkpoint.
    options = {"dataset": dataset, "max_steps": 17, "log_interval": 3, "eval_interval": 4, "save_interval": n}
    one = tiny(**options, out_dir=str(tmp_path / "one"), dropout=0.2)
    two = replace(one, out_dir=str(tmp_path / "two"), init_from=init_from)
    train.train(one)
    with stopped_at(n + 1):
        train.train(replace(two, init_from="auto"))
    assert rows(two)[-1]["step"] > n == saved(two)["progress"]["step"]
    torch.manual_seed(99)  # must not matter: the generators' states come from the checkpoint
    train.train(two)
    assert rows(two, *LOGGED) == rows(one, *LOGGED)
    assert [row["step"] for row in rows(two)] == [3, 4, 6, 8, 9, 12, 15, 16, 17]
    for name in ("last", "best"):
        assert_same_state(two, one, name=name)


def test_a_longer_run_continues_where_the_shorter_one_ended(copy, run_main):
    """A finished run says so and changes nothing; a truncated last line of its metrics is repaired."""
    before = Path(copy.out_dir, "last.safetensors").read_bytes(), rows(copy)
    result = run_main(train.main, *words(copy, init_from="resume"))
    assert result.code == 0 and "nothing is left to train" in result.out
    assert (Path(copy.out_dir, "last.safetensors").read_bytes(), rows(copy)) == before
    path = Path(copy.out_dir, "metrics.jsonl")
    path.write_text(path.read_text()[:-20])
    assert run_main(train.main, *words(copy, init_from="resume", max_steps=9)).code == 0
    assert [row["step"] for row in rows(copy)] == [1, 2, 3, 4, 5, 7, 8, 9] and saved(copy)["progress"]["step"] == 9


@pytest.mark.parametrize("init_from", ["scratch", "PATH"])
def test_a_new_run_does_not_replace_another(init_from, trained, copy, refused):
    """Not even one that was stopped before its first last.safetensors."""
    init_from = init_from.replace("PATH", f"{trained.out_dir}/last.safetensors")
    Path(copy.out_dir, "last.safetensors").unlink()
    files = {path: path.read_bytes() for path in Path(copy.out_dir).iterdir()}
    line = refused(train.main, *words(copy, seed=2, eval_interval=0, init_from=init_from))
    assert "--init_from=resume" in line and "delete the folder" in line
    assert files == {path: path.read_bytes() for path in Path(copy.out_dir).iterdir()}


@pytest.mark.parametrize("key, value, expected", [("context_length", 8, "=16"), ("optimizer", "sgd", "=adamw")])
def test_resuming_needs_the_same_context_length_and_optimizer(key, value, expected, copy, refused):
    line = refused(train.main, *words(copy, init_from="resume", max_steps=8, **{key: value}))
    assert f"{key}{expected}" in line and "--init_from=" in line


# -- saving


def test_any_tool_for_safetensors_reads_a_checkpoint(trained):
    """The file holds what nanoladder/checkpoint's docstring says; read only with the safetensors library."""
    path = Path(trained.out_dir, "last.safetensors")
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = {key: json.loads(text) for key, text in file.metadata().items() if key != "sha256"}
    expected = {"format_version", "config", "tokenizer", "data", "progress", "scaler", "optimizer", "generators"}
    assert metadata.keys() == expected
    assert metadata["format_version"] == 5 and metadata["progress"]["step"] == 6 and metadata["scaler"] == {}
    ranks = Path(trained.out_dir, "tokenizer.tiktoken").read_bytes()
    assert metadata["tokenizer"] == {"sha256": hashlib.sha256(ranks).hexdigest()}
    assert re.fullmatch(r"\d+ tokens, digest [0-9a-f]{8}", metadata["data"]["train.bin"])
    model = GPT(Config(**metadata["config"]))
    names = dict(model.named_parameters()).keys()
    states = {f"optimizer/{name}/{state}" for name in names for state in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == names | states | {"generators/cpu"}
    assert all(tensor.is_contiguous() and tensor.data_ptr() % tensor.itemsize == 0 for tensor in tensors.values())
    missing, unexpected = model.load_state_dict({name: tensors[name] for name in names}, strict=False)
    assert missing == ["head.weight"] and not unexpected  # tied to the embedding
    assert same(model.state_dict(), weights(trained))


SWAP = """
import itertools, os
for name in itertools.cycle("ab"):
    os.link(name, "t"), os.replace("t", "x"), print(flush=True)
"""


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_of_the_two(trained, tmp_path):
    """The safetensors library opens a path twice: it refused half of these."""
    shutil.copy(Path(trained.out_dir, "last.safetensors"), tmp_path / "a")
    other = tiny(dataset=trained.dataset, out_dir=str(tmp_path / "run"), max_steps=1, n_layer=5)
    train.train(other)
    shutil.copy(Path(other.out_dir, "last.safetensors"), tmp_path / "b")
    with subprocess.Popen([sys.executable, "-S", "-c", SWAP], cwd=tmp_path, stdout=subprocess.PIPE) as swapping:
        try:
            swapping.stdout.readline()
            states = [checkpoint.load(tmp_path / "x") for _ in range(60)]
        finally:
            swapping.kill()
    assert {(state["progress"]["step"], state["config"]["n_layer"]) for state in states} <= {(6, 2), (1, 5)}


VALUES = [
    *(True, False, None, 3, -(2**70), 2.0, 0.1, 1e-300, math.inf),
    *("text", "naïve ☕\n", {"part": 1.0, "more": False}),
]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def test_values_and_tensors_of_any_type_survive_saving_and_loading(trained, tmp_path):
    state, path = saved(trained), tmp_path / "x.safetensors"
    values = {f"value{n}": value for n, value in enumerate(VALUES)}
    values |= {
        f"tensor{n}": torch.arange(-3, 3).to(getattr(torch, dtype)).reshape(2, 3) for n, dtype in enumerate(DTYPES)
    }
    values |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5), "transposed": torch.rand(3, 5).T}
    values |= {"parts": {"codes": torch.arange(7, dtype=torch.uint8), "signed": True}, "empty": {}}
    state["optimizer"] = {"norm.weight": values, "token_embedding.weight": {}}
    write_state(path, state)
    assert same(format.read(path), state)
    found = format.read(path)["optimizer"]["norm.weight"]
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in values.items()}
    assert all(found[f"tensor{n}"].dtype == getattr(torch, dtype) for n, dtype in enumerate(DTYPES))


# -- files that are not checkpoints of ours


def test_a_file_of_another_version_or_program_is_refused(copy, tmp_path, refused):
    path = Path(copy.out_dir, "last.safetensors")
    others = [
        lambda: write_state(path, {**checkpoint.load(path), "format_version": 4}),
        lambda: safetensors.torch.save_file({"x": torch.ones(3)}, path, {"format": "pt"}),
    ]
    for write in others:
        write()
        assert str(path) in refused(train.main, *words(copy, init_from=path, out_dir=tmp_path / "new"))
        assert not (tmp_path / "new").exists()


def test_a_missing_checkpoint_is_refused(trained, tmp_path, refused):
    for given in ({"init_from": "resume"}, {"init_from": "nowhere/ckpt.pt"}, {"init_from": "."}):
        line = refused(train.main, *words(trained, out_dir=tmp_path / "new", **given))
        assert "no checkpoint at" in line and not (tmp_path / "new").exists()


# -- starting from another run's weights


def test_init_from_a_path_takes_the_weights_and_nothing_else(trained, tmp_path):
    """A shorter context takes the first positions."""
    path = f"{trained.out_dir}/last.safetensors"
    still = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 0.0, "min_lr": 0.0}
    other = replace(trained, out_dir=str(tmp_path / "new"), init_from=path, context_length=5, **still)
    train.train(other)
    ours, theirs = weights(other), weights(trained)
    name = "position_embedding.weight"
    assert torch.equal(ours.pop(name), theirs.pop(name)[:5]) and same(ours, theirs)
    assert [row["step"] for row in rows(other)] == [1]
    steps = {float(state["step"]) for state in saved(other)["optimizer"].values()}
    assert steps == {1.0}  # the optimizer started afresh


SHAPES = [
    ({"context_length": 17}, "--context_length=16"),
    ({"n_layer": 3}, "n_layer=2"),
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
