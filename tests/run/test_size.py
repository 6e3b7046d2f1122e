"""The size of a model and its state, known before anything is built."""

import re
from collections import Counter
from typing import get_args

import pytest
import torch
from conftest import RECIPE, build, flags, state_bytes, tiny, with_torchao

import train
from model import GPT
from nanoladder import machine
from nanoladder.arithmetic import Grid, count_block, count_parameters, list_weights
from nanoladder.config import TYPES
from nanoladder.parallel.mesh import Mesh
from nanoladder.run import size

SHAPES = [key for key in RECIPE if key not in ("optimizer", "embedding_lr", "scalar_lr")]
KEYS = [{}, {"bias": True}, {"n_layer": 3, "value_embedding": True}, RECIPE, RECIPE | {"bias": True, "n_layer": 1}]
KEYS += [{"pad_vocab_to": 64}, {"pad_vocab_to": 64, "tie_embeddings": False}]
KEYS += [{key: RECIPE[key]} for key in SHAPES if key not in ("head_lr", "split_qkv", "polar_express")]


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_the_weights_listed_are_those_of_the_model(keys):
    config = tiny(vocab_size=17, **keys)
    model = GPT(config)
    own = Counter((re.sub(r"\.\d+\.", ".*.", name), tuple(p.shape)) for name, p in model.named_parameters())
    assert {(name, shape): count for name, shape, count in list_weights(config)} == own
    assert count_parameters(config) == model.n_params
    assert count_block(config) == sum(p.numel() for p in model.blocks[0].parameters())


@pytest.mark.parametrize("keys", [{"optimizer_in_backward": True, "grad_clip": 0.0}, {}])
@pytest.mark.parametrize("name", with_torchao(get_args(TYPES["optimizer"])))
def test_the_state_has_the_bytes_that_are_known_before_it_is_built(name, keys):
    config = tiny(n_embd=128, vocab_size=250, context_length=32, pad_vocab_to=64, optimizer=name, **keys)
    model, optimizer, scaler = build(config)
    batch = torch.randint(250, (2, 1, 32))
    train.train_step(model, optimizer, scaler, train.data.Batch(*batch), 1e-3, config)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    weights = sum(p.nbytes for p in model.parameters())
    assert size.state_bytes(config) == (weights, gradients, state_bytes(optimizer))


def test_processes_that_share_the_state_hold_a_part_each(monkeypatch):
    config = tiny(vocab_size=17)
    whole = size.state_bytes(config)
    monkeypatch.setattr(size.parallel, "mesh", lambda: Mesh(Grid(pipeline=2, data=4, tensor=2), n_sharing=4))
    assert size.state_bytes(config) == tuple(round(part / 16) for part in whole)


BEYOND = {"n_layer": 10**9}, {"n_embd": 2**40, "n_head": 1}, {"n_layer": 2**62, "n_embd": 2**62, "n_head": 1}


@pytest.mark.parametrize("keys", BEYOND, ids=str)
def test_a_model_that_cannot_fit_is_refused_before_it_is_built(keys, dense, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(train, "build_model", None)
    line = refused(train.main, *flags(dataset=dense, out_dir=tmp_path / "run", **keys))
    n = count_parameters(tiny(vocab_size=17, **keys))
    assert f"{n:,} parameters take " in line and "--optimizer=adafactor" in line and not (tmp_path / "run").exists()


def test_the_limit_is_the_memory_that_the_device_has(dense, tmp_path, refused, monkeypatch, run_main):
    config = tiny(vocab_size=17)
    need = sum(size.state_bytes(config))
    given = flags(dataset=dense, out_dir=tmp_path / "run")
    monkeypatch.setattr(machine, "total_memory", lambda device: need - 1)
    assert "but cpu has 0." in refused(train.main, *given)
    monkeypatch.setattr(machine, "total_memory", lambda device: need)
    assert run_main(train.main, *given).code == 0
