"""The step's CUDA graph: recorded at the second step, replayed from then on. Emulated on a CPU."""

import json

import pytest
import torch
from conftest import assert_same_state, build, flags, replace, same, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import train
from nanoladder import machine
from nanoladder.data import Batch
from nanoladder.machine import graph

KEYS = {"vocab_size": 40, "batch_size": 4, "context_length": 16, "cuda_graph": True, "set_to_none": True}
CPU = torch.device("cpu")


class Recorder(TorchDispatchMode):
    """Emulates torch.cuda.CUDAGraph: replay() reruns the recorded operators with the same input and output memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self.calls:
            new = function(*args, **kwargs)
            for old, fresh in zip(tensors(result), tensors(new), strict=True):
                if old.data_ptr() != fresh.data_ptr():  # else a view, or written in place
                    old.copy_(fresh)


def tensors(tree):
    found = []
    tree_map_only(torch.Tensor, found.append, tree)
    return found


@pytest.fixture
def emulated(monkeypatch):
    """Steps on a CPU are recorded."""
    monkeypatch.setattr(graph, "capture_obstacle", lambda config, device: "")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", lambda recorder, **options: recorder)


def steps(config, n=5):
    """Losses and norms of n steps on different batches, final weights, and the address of each forward's inputs."""
    torch.manual_seed(0)
    model, optimizer, scaler = build(config)
    calls = []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].data_ptr()))
    found = []
    for step in range(n):
        tokens = torch.randint(40, (4, 17), generator=torch.Generator().manual_seed(step))
        loss, norm = train.train_step(model, optimizer, scaler, Batch(tokens[:, :-1], tokens[:, 1:]), 1e-2, config)
        found.append((loss, norm))  # read at the end: a later replay must not change them
    return [(float(loss), float(norm)) for loss, norm in found], model.state_dict(), calls


@pytest.mark.parametrize(
    "keys",
    [{}, {"set_to_none": False}, {"micro_batch_size": 1}, {"loss_chunks": 3}, {"grad_clip": 0.1}],
    ids=str,
)
def test_a_recorded_step_trains_like_any_other(emulated, keys):
    config = tiny(**KEYS | {"lazy_metrics": True, **keys})
    n_micro = 4 if config.micro_batch_size else 1
    losses, weights, calls = steps(config)
    expected, expected_weights, usual = steps(replace(config, cuda_graph=False))
    assert losses == expected and same(weights, expected_weights)
    assert (len(calls), len(usual)) == (2 * n_micro, 5 * n_micro)  # the second is recorded
    assert calls[:n_micro] == calls[n_micro:]  # in the memory of the first step: nothing recompiles during recording


def test_every_replay_draws_new_dropout(emulated):
    model, optimizer, scaler = build(config := tiny(**KEYS | {"dropout": 0.5, "attention": "sdpa"}))
    tokens = torch.arange(64).reshape(4, 16) % 40
    batch = Batch(tokens, tokens)
    losses = [float(train.train_step(model, optimizer, scaler, batch, 0.0, config)[0]) for _ in range(6)]
    assert len(set(losses)) == 6


def test_a_recorded_run_resumes_bit_for_bit(emulated, dense, tmp_path):
    given = {"dataset": str(dense), "lr_decay_steps": 6, "cuda_graph": True, "eval_interval": 2, "set_to_none": True}
    whole = tiny(out_dir=str(tmp_path / "whole"), **given)
    train.train(whole)
    parts = replace(whole, out_dir=str(tmp_path / "parts"))
    train.train(replace(parts, max_steps=3))
    train.train(replace(parts, init_from="resume"))
    assert_same_state(whole, parts, "model", "optimizer", "progress")


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({}, ""),
        ({"activation_checkpointing": "every:1", "compile": True}, ""),
        ({"activation_checkpointing": "every:1", "compile": False}, "recomputation"),
        ({"activation_checkpointing": "every:1", "compile": True, "shard": "full"}, "recomputation"),
        ({"optimizer_in_backward": True, "grad_clip": 0.0}, "optimizer_in_backward"),
    ],
    ids=str,
)
def test_the_reason_why_a_step_cannot_be_recorded_is_named(keys, reason, monkeypatch):
    config = tiny(**keys)
    assert machine.capture_obstacle(config, CPU) == "CPU" and not machine.can_capture(config, CPU)
    assert machine.capture_obstacle(config, torch.device("cuda")).startswith(reason)
    assert machine.can_capture(config, torch.device("cuda")) == (not reason)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "processes" in machine.capture_obstacle(config, torch.device("cuda"))


def test_the_header_says_why_there_is_no_graph(dense, tmp_path, capsys):
    words = flags(dataset=dense, out_dir=tmp_path / "run", max_steps=1, cuda_graph=True)
    train.main(words)
    assert "; CUDA graph: off (CPU); " in capsys.readouterr().out
    assert json.loads((tmp_path / "run/config.json").read_text())["cuda_graph"] is True
