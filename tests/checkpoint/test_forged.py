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
    "wide beyond any integer of C": {"n_embd": 2 * 10**20},
    "many tokens": {"vocab_size": 10**12},
    "negative": {"n_layer": -1},
    "text": {"n_layer": "2"},
    "nothing": {"bias": None},
    "long text": {"out_dir": "x" * 10**6},
    "nested lists": {"n_layer": nested(300)},
    "infinite": {"dropout": math.inf, "n_layer": math.inf},
    "unknown key": {"n_layers": 2},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_the_file_does_not_bear_out_is_refused(config, refuses):
    refuses(changed("config", **config))


CONTENTS = {
    "a weight missing": without("model", NORM),
    "a weight too many": changed("model", other=torch.ones(3)),
    "a weight of another type": changed("model", **{NORM: torch.ones(32, dtype=torch.float64)}),
    "a weight of another shape": changed("model", **{NORM: torch.ones(33)}),
    "no step": without("progress", "step"),
    "a step before the first": changed("progress", step=-3),
    "a loss of another type": changed("progress", best_val_loss=nested(60)),
    "a tokenizer without a digest": changed("tokenizer", sha256=[1]),
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
    "a pickle with code": content(pickle.dumps(Call(), 2)),
    "an archive with code": lambda path, state: torch.save({"model": Call()}, path),
    "a ckpt.pt with code": lambda path, state: torch.save({"model_args": Call()}, path),
    "compressed": content(gzip.compress(bytes(10**8))),
    "a header of a terabyte": terabyte,
    "a header of lists": header(b"[" + b"[]," * 10**6 + b"[]]"),
    "a nested header": header(DEEP.encode()),
    "a number of a million digits": header(b'{"a": %s}' % (b"9" * 10**6)),
    "a tensor twice": rewritten(f'"{NORM}"', f'"{NORM}": {EMPTY}, "{NORM}"'),
    "an entry of the metadata twice": rewritten('"sha256"', '"sha256": "", "sha256"'),
    "a key of the config twice": stated(config='{"n_layer": 1, "n_layer": 1}'),
    "a nested config": stated(config=DEEP),
    "a nested version": stated(format_version=DEEP),
    "a part that is a list": stated(scaler="[]"),
    "no digest": rewritten('"sha256"', '"sha512"'),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_file_made_to_do_harm_is_refused(made, refuses):
    refuses(made)


# -- what does not fit the run that resumes


def learned(**changes):
    """A checkpoint whose optimizer's state of one weight has other entries."""
    return lambda path, state: changed("optimizer", **{NORM: {**state["optimizer"][NORM], **changes}})(path, state)


LEARNED = {
    "nothing learned": replaced("optimizer", {}),
    "a parameter too many": changed("optimizer", **{"99": {}}),
    "a parameter that is a list": replaced("optimizer", {NORM: []}),
    "an entry too many": learned(more=torch.ones(1)),
    "another shape": learned(exp_avg=torch.ones(3)),
    "another type": learned(exp_avg_sq=1.0),
    "parts of nothing": learned(exp_avg={"codes": torch.ones(32), "signed": True}),
    "no generator": without("generators", "cpu"),
    "a generator of another size": changed("generators", cpu=torch.zeros(1, 7, dtype=torch.uint8)),
    "a generator that is a number": changed("generators", cpu=torch.tensor(1, dtype=torch.uint8)),
}


@pytest.mark.parametrize("made", LEARNED.values(), ids=LEARNED)
def test_what_does_not_fit_the_optimizer_or_the_generators_is_refused(made, refuses):
    refuses(made, only_resuming=True)


STRAY = {
    "of no weight": "optimizer.other.exp_avg",
    "too deep": f"optimizer.{NORM}.exp_avg{'.a' * 10**5}",
    "in the place of a value": f"optimizer.{NORM}.step",
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
    "codes of another shape": {"codes": torch.ones(32, 64, dtype=torch.uint8)},
    "scales of another type": {"scale": torch.ones(16, dtype=torch.int64)},
    "a map of three": {"qmap": torch.ones(3)},
    "a sign that is text": {"signed": "yes"},
    "a part too many": {"more": torch.ones(1)},
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
