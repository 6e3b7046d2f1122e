"""Malicious checkpoints: refused with one line, in little time and memory, without executing anything."""

import gzip
import io
import json
import math
import os
import pickle
import resource
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import replace, saved, tiny

import sample
import train
from nanoladder import checkpoint

NORM = "norm.weight"


def trained(folder, **keys):
    """The config of a run in the folder, which is trained."""
    config = tiny(out_dir=str(folder), n_layer=1, save_interval=2, **keys)
    train.train(config)
    return config


@pytest.fixture(scope="module")
def six(tmp_path_factory, dense):
    """A run of 6 steps."""
    return trained(tmp_path_factory.mktemp("six") / "run", dataset=str(dense), max_steps=6, lr_decay_steps=8)


@pytest.fixture(scope="module")
def in_8_bits(tmp_path_factory, dense):
    """A run of 2 steps of 8-bit AdamW."""
    folder = tmp_path_factory.mktemp("in_8_bits") / "run"
    return trained(folder, dataset=str(dense), optimizer="adamw8bit", n_embd=64, max_steps=2)


def words(config):
    return [f"--{key}={value}" for key, value in vars(config).items()]


@pytest.fixture
def refuses(six, tmp_path, refused):
    """refuses(write): what write(path, state) makes is refused by sample.py and train.py, soon and in little memory."""

    def refuse(write, only_resuming=False):
        path = tmp_path / "run" / "last.safetensors"
        path.parent.mkdir()
        write(path, saved(six))
        before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = replace(six, max_steps=8, out_dir=str(path.parent), init_from="resume")
        lines = [refused(train.main, *words(config))]
        if not only_resuming:
            fresh = replace(config, init_from=str(path), out_dir=str(tmp_path / "new"))
            lines.append(refused(train.main, *words(fresh)))
            lines.append(refused(sample.main, f"--out_dir={path.parent}", "--device=cpu"))
        assert all(str(path) in line and len(line) < 1000 for line in lines)
        assert time.process_time() - before < 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # KiB
        assert not Path("executed").exists()
        return lines

    return refuse


# -- states that someone changed, in files that are otherwise in order


def replaced(part, value):
    return lambda path, state: checkpoint.write_file(path, {**state, part: value})


def changed(part, **changes):
    return lambda path, state: replaced(part, {**state[part], **changes})(path, state)


def without(part, missing):
    def write(path, state):
        replaced(part, {key: value for key, value in state[part].items() if key != missing})(path, state)

    return write


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


CONFIGS = {
    "many blocks": {"n_layer": 10**9},
    "wide": {"n_embd": 2 * 10**6},
    "wide beyond any integer of C": {"n_embd": 2 * 10**20},
    "many heads": {"n_head": 10**9},
    "long": {"context_length": 10**12},
    "many tokens": {"vocab_size": 10**12},
    "padding": {"pad_vocab_to": 10**15},
    "negative": {"n_layer": -1},
    "none": {"n_embd": 0},
    "text": {"n_layer": "2"},
    "fraction": {"n_head": 2.0},
    "nothing": {"bias": None},
    "huge": {"n_layer": 1 << 2000},
    "long text": {"out_dir": "x" * 10**6},
    "list": {"n_layer": [2]},
    "nested lists": {"n_layer": nested(300)},
    "object": {"n_layer": {"value": 2}},
    "infinite": {"dropout": math.inf, "n_layer": math.inf},
    "unknown key": {"n_layers": 2},
    "many keys": {f"key{n}": 2 for n in range(10**5)},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_the_file_does_not_bear_out_is_refused(config, refuses):
    refuses(changed("config", **config))


CONTENTS = {
    "a weight missing": without("model", NORM),
    "a weight too many": changed("model", other=torch.ones(3)),
    "a weight of another type": changed("model", **{NORM: torch.ones(32, dtype=torch.float64)}),
    "a weight of another shape": changed("model", **{NORM: torch.ones(33)}),
    "a weight of another name": changed("model", **{f"{NORM}.": torch.ones(32)}),
    "a tied weight twice": changed("model", **{"head.weight": torch.ones(17, 32)}),
    "no weights": replaced("model", {}),
    "no step": without("progress", "step"),
    "a step of another type": changed("progress", step=6.0),
    "a step before the first": changed("progress", step=-3),
    "a loss of another type": changed("progress", best_val_loss=nested(60)),
}


@pytest.mark.parametrize("made", CONTENTS.values(), ids=CONTENTS)
def test_weights_or_progress_that_no_run_has_are_refused(made, refuses):
    refuses(made)


# -- files that someone made


def crafted(change):
    """A checkpoint of which change(header, data) returns both anew, the header as a dict or as bytes."""

    def write(path, state):
        buffer = io.BytesIO()
        checkpoint.format.serialize(state, buffer)
        content = buffer.getvalue()
        size = int.from_bytes(content[:8], "little")
        header, data = change(json.loads(content[8 : 8 + size]), content[8 + size :])
        header = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)

    return write


def entry(**changes):
    """A checkpoint whose header says something else of a tensor."""
    return crafted(lambda header, data: ({**header, NORM: {**header[NORM], **changes}}, data))


def added(more=b"", **tensors):
    """A checkpoint with more tensors, {name: (dtype, shape, begin, end)}; places count from the end of the others."""

    def change(header, data):
        for name, (dtype, shape, *ends) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data) + end for end in ends]}
        return header, data + more

    return crafted(change)


def rewritten(text, other):
    """A checkpoint in whose header a text is another, once."""

    def change(header, data):
        assert text in json.dumps(header)
        return json.dumps(header).replace(text, other, 1).encode(), data

    return crafted(change)


def stated(**texts):
    """A checkpoint whose metadata has other texts, and the digest that belongs to them."""

    def write(path, state):
        tensors, metadata = checkpoint.format.flatten(state)
        metadata |= texts
        metadata["sha256"] = checkpoint.format.digest(metadata, tensors)
        safetensors.torch.save_file(tensors, path, metadata)

    return write


def content(*parts):
    return lambda path, state: path.write_bytes(b"".join(parts))


def header(text):
    return content(len(text).to_bytes(8, "little"), text)


def terabyte(path, state):
    """A file of holes, all of which would be header."""
    path.write_bytes((10**12 - 8).to_bytes(8, "little"))
    os.truncate(path, 10**12)


class Call:
    def __reduce__(self):
        return os.mkdir, ("executed",)


EMPTY = '{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
DEEP = "[" * 10**6 + "]" * 10**6
MADE = {
    "format 1 with code": lambda path, state: torch.save({"format_version": 1, "model": Call()}, path),
    "a pickle with code": content(pickle.dumps(Call(), 2)),
    "a header that is a pickle with code": header(pickle.dumps(Call(), 2)),
    "compressed": content(gzip.compress(bytes(10**8))),
    "a header beyond the file": content((2**20).to_bytes(8, "little"), b"{}"),
    "a header beyond any file": content(b"\xff" * 8, b"{}"),
    "a header of a terabyte": terabyte,
    "a header of lists": header(b"[" + b"[]," * 10**6 + b"[]]"),
    "a header without end": header(b'{"a":'),
    "no header": content(bytes(8)),
    "a header that is a list": header(b"[1, 2]"),
    "a nested header": header(DEEP.encode()),
    "a number of a million digits": header(b'{"a": %s}' % (b"9" * 10**6)),
    "a fraction of a million digits": header(b'{"a": 0.%s}' % (b"9" * 10**6)),
    "a tensor twice": rewritten(f'"{NORM}"', f'"{NORM}": {EMPTY}, "{NORM}"'),
    "metadata twice": rewritten('"__metadata__"', '"__metadata__": {}, "__metadata__"'),
    "an entry of the metadata twice": rewritten('"sha256"', '"sha256": "", "sha256"'),
    "a key of the config twice": stated(config='{"n_layer": 1, "n_layer": 1}'),
    "metadata that is a number": rewritten('"format_version": "2"', '"format_version": 2'),
    "a tensor of 4 TB": entry(shape=[10**12]),
    "a tensor of more bytes than there are numbers for": entry(shape=[2**62, 2**62]),
    "a tensor of a negative size": entry(shape=[-32]),
    "a tensor of an unknown type": entry(dtype="F33"),
    "a tensor of another type": entry(dtype="I32"),
    "a tensor without a shape": entry(shape=None),
    "a tensor of half bytes": added(b"12", half=("F4", [4], 0, 2)),
    "overlapping tensors": added(b"1234", one=("U8", [3], 0, 3), two=("U8", [3], 1, 4)),
    "one place for two tensors": added(b"1234", one=("U8", [4], 0, 4), two=("U8", [4], 0, 4)),
    "a hole between tensors": added(b"1234", one=("U8", [1], 0, 1), two=("U8", [1], 3, 4)),
    "bytes of no tensor": added(b"1234"),
    "a tensor beyond the file": added(b"1234", one=("U8", [8], 0, 8)),
    "a tensor from its end to its begin": entry(data_offsets=[128, 0]),
    "a tensor before the file": entry(data_offsets=[-128, 0]),
    "offsets that overflow": entry(data_offsets=[2**64 - 128, 2**64]),
    "a tensor that is not aligned": added(b"123456789", one=("U8", [1], 0, 1), two=("F64", [1], 1, 9)),
    "many empty tensors": added(**{f"tensor{n}": ("F32", [0], 0, 0) for n in range(40_000)}),
    "a nested config": stated(config=DEEP),
    "a nested version": stated(format_version=DEEP),
    "a version that is text": stated(format_version='"2"'),
    "a part that is a list": stated(config="[]"),
    "a part that is not JSON": stated(scaler="{"),
    "no digest": rewritten('"sha256"', '"sha512"'),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_file_made_to_do_harm_is_refused(made, refuses):
    refuses(made)


@pytest.mark.parametrize("name", ["last.pt", "best.pt", "step_00000250.pt"])
def test_a_checkpoint_of_an_older_version_is_refused_unread(name, six, tmp_path, refused):
    """By its name in a run's folder, and as the file to start from; a new run may replace it."""
    path = tmp_path / "run" / name
    path.parent.mkdir()
    torch.save({"format_version": 1, "model": Call()}, path)
    config = replace(six, out_dir=str(path.parent))
    for init_from in ("resume", "auto", str(path)):
        run = replace(config, init_from=init_from, overwrite=init_from == str(path))
        line = refused(train.main, *words(run))
        assert f"{path} was written by an older version" in line and "start over" in line
    assert "--overwrite=True" in refused(train.main, *words(config))
    assert not Path("executed").exists() and path.exists()
    train.train(replace(config, overwrite=True))
    assert not path.exists() and saved(config)["progress"]["step"] == 6


def test_a_model_of_an_older_version_is_not_sampled(tmp_path, refused):
    torch.save({"format_version": 1, "model": Call()}, tmp_path / "last.pt")
    assert "was written by an older version" in refused(sample.main, f"--out_dir={tmp_path}", "--device=cpu")


# -- what does not fit the run that resumes


def learned(**changes):
    """A checkpoint whose optimizer's state of one weight has other entries."""
    return lambda path, state: changed("optimizer", **{NORM: {**state["optimizer"][NORM], **changes}})(path, state)


LEARNED = {
    "nothing learned": replaced("optimizer", {}),
    "a parameter missing": without("optimizer", NORM),
    "a parameter too many": changed("optimizer", **{"99": {}}),
    "a parameter that is a list": replaced("optimizer", {NORM: []}),
    "an entry too many": learned(more=torch.ones(1)),
    "another shape": learned(exp_avg=torch.ones(3)),
    "another type": learned(exp_avg_sq=1.0),
    "parts of nothing": learned(exp_avg={"codes": torch.ones(32), "signed": True}),
    "no generator": without("generators", "cpu"),
    "a generator of another size": changed("generators", cpu=torch.zeros(1, 7, dtype=torch.uint8)),
    "a generator of another type": changed("generators", cpu=torch.zeros(1, 5056)),
    "a generator of zeros": changed("generators", cpu=torch.zeros(1, 5056, dtype=torch.uint8)),
    "a generator that is a number": changed("generators", cpu=torch.tensor(1, dtype=torch.uint8)),
}


@pytest.mark.parametrize("made", LEARNED.values(), ids=LEARNED)
def test_what_does_not_fit_the_optimizer_or_the_generators_is_refused(made, refuses):
    refuses(made, only_resuming=True)


STRAY = {
    "of no weight": "optimizer.other.exp_avg",
    "of nothing": "optimizer",
    "too deep": f"optimizer.{NORM}.exp_avg{'.a' * 10**5}",
    "in the place of a value": f"optimizer.{NORM}.step",
    "below a value": f"optimizer.{NORM}.step.codes",
}


@pytest.mark.parametrize("name", STRAY.values(), ids=STRAY)
def test_a_tensor_that_has_no_place_is_refused(name, refuses):
    def write(path, state):
        learned = state["optimizer"][NORM] | {"step": 3.0}
        state["optimizer"] |= {NORM: learned}
        changed("model", **{name: torch.ones(1)})(path, state)

    refuses(write)


EIGHT = {
    "no scales": {"scale": torch.empty(0)},
    "more scales than codes": {"scale": torch.ones(10**4)},
    "codes of another type": {"codes": torch.ones(64, 64)},
    "codes of another shape": {"codes": torch.ones(32, 64, dtype=torch.uint8)},
    "scales of another type": {"scale": torch.ones(16, dtype=torch.int64)},
    "a map of three": {"qmap": torch.ones(3)},
    "a sign that is text": {"signed": "yes"},
    "a part too many": {"more": torch.ones(1)},
    "codes that are a number": {"codes": 1.0},
}


@pytest.mark.parametrize("parts", EIGHT.values(), ids=EIGHT)
def test_an_8_bit_state_that_does_not_fit_is_refused(parts, in_8_bits, tmp_path, refused):
    state, name = saved(in_8_bits), "blocks.0.attention.proj.weight"
    assert state["optimizer"][name]["exp_avg"]["codes"].dtype == torch.uint8
    state["optimizer"][name]["exp_avg"] |= parts
    checkpoint.write_file(tmp_path / "last.safetensors", state)
    line = refused(train.main, *words(replace(in_8_bits, out_dir=str(tmp_path), init_from="resume", max_steps=3)))
    assert "optimizer" in line


def test_another_optimizers_state_is_refused(six, refused):
    line = refused(train.main, *words(replace(six, init_from="resume", max_steps=8, optimizer="sgd")))
    assert "optimizer" in line


@pytest.mark.parametrize("scaler", [{}, {"scale": "x"}, {"scale": 1.0}])
def test_a_scaler_that_does_not_fit_is_refused(scaler, dense, tmp_path, refused):
    config = trained(tmp_path, dataset=str(dense), dtype="float16", attention="sdpa", max_steps=2)
    checkpoint.write_file(tmp_path / "last.safetensors", {**saved(config), "scaler": {**scaler, "more": 1}})
    assert "scaler" in refused(train.main, *words(replace(config, max_steps=3, init_from="resume")))
