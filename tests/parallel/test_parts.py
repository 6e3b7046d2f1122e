"""Weights that a process of a tensor or context group has, activations that it keeps, collectives that it runs."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import build, tiny
from torch.utils.flop_counter import FlopCounterMode

import train
from lab.measure.launch import run_together
from lab.measure.traffic import Counter
from lab.predict.simulated_rank import one_of
from model import GPT
from nanoladder import parallel
from nanoladder.data import Batch
from nanoladder.parallel import context

KEYS = {
    "plain": {"bias": True},
    "chunks": {"pad_vocab_to": 64, "loss_chunks": 3, "attention": "sdpa"},
}


def look_at_tensor_parallel(names):
    """Returns this process's parts of the weights, activation shapes, and a step's collectives, for each config."""
    found = {}
    for name in names:
        config = tiny(n_head=4, tensor_parallel=2, vocab_size=17, ddp=True, **KEYS[name])
        model, sizes = train.build_model(config, train.set_up(config)), {}
        for module in ("blocks.0.attention_norm", "blocks.0.mlp", "norm"):

            def record(_, inputs, output, module=module, sizes=sizes):
                sizes[module] = list(getattr(output, "to_local", lambda: output)().shape)

            model.get_submodule(module).register_forward_hook(record)
        own = {name: parameter.to_local() for name, parameter in model.named_parameters()}
        batch = Batch(*torch.zeros(2, 4, 16, dtype=torch.int64))
        with Counter() as counter:
            model(batch.inputs, batch.targets).backward()
        found[name] = {
            "shapes": {name: list(part.shape) for name, part in own.items()},
            "bytes": {name: part.untyped_storage().nbytes() for name, part in own.items()},
            "tied": model.head.weight is model.token_embedding.weight,
            "sizes": sizes,
            "calls": {kind: calls for kind, (calls, _) in counter.sent.items()},
        }
    return found


def look_at_context_parallel():
    """Returns the largest error of this process's part of attention and its gradients, and its collectives."""
    found = {}
    for name, keys in {"heads": {"n_head": 4}, "keys": {"n_head": 2, "attention": "sdpa"}}.items():
        config = tiny(context_parallel=4, vocab_size=8, ddp=True, **keys)
        train.set_up(config)
        model = GPT(config)
        parallel.apply_context_parallel(model)
        shape = (4, 2, config.n_head, config.context_length, 8)  # q, k, v and the gradient of the output
        *inputs, gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        whole, own = [tensor.clone().requires_grad_() for tensor in inputs], context.positions(config)
        y = F.scaled_dot_product_attention(*whole, is_causal=True)
        (y * gradient).sum().backward()
        parts = [tensor[:, :, own].clone().requires_grad_() for tensor in inputs]
        with Counter() as counter:
            ours = model.blocks[0].attention.attend(*parts)
            (ours * gradient[:, :, own]).sum().backward()
        errors = [ours - y[:, :, own], *(p.grad - w.grad[:, :, own] for p, w in zip(parts, whole, strict=True))]
        found[name] = {"error": max(float(error.abs().max()) for error in errors), "sent": dict(counter.sent)}
    return found


@pytest.mark.slow
def test_a_process_has_half_of_every_matrix_and_of_the_sequence(tmp_path):
    for rank, process in enumerate(run_together(look_at_tensor_parallel, ["plain", "chunks"], n=2, folder=tmp_path)):
        for name, found in process.items():
            shapes = found["shapes"]
            rows_of_vocabulary = (9, 8)[rank] if name == "plain" else 32  # of 17 and 64
            assert shapes["token_embedding.weight"] == [rows_of_vocabulary, 32] and found["tied"]
            assert shapes["blocks.1.attention.qkv.weight"] == [3 * 16, 32]
            assert shapes["blocks.1.attention.proj.weight"] == [32, 16]
            assert shapes["blocks.1.mlp.fc.weight"] == [64, 32]
            assert shapes["blocks.1.mlp.proj.weight"] == [32, 64]
            assert found["bytes"] == {name: 4 * math.prod(shape) for name, shape in shapes.items()}  # no views
            assert list(found["sizes"].values()) == [[4, 8, 32]] * 3  # (B, T / 2, C)
        # Activations of two blocks: eight of each; embedding and loss: two of each. all_reduce: norms and positions
        exchanges = {"all_gather": 4 * 2 + 2, "reduce_scatter": 4 * 2 + 2, "all_reduce": 2 * 2 + 2}
        assert {kind: process["chunks"]["calls"][kind] for kind in exchanges} == exchanges


def test_shards_cut_the_parts_of_matrices_once_more():
    config = tiny(n_head=4, tensor_parallel=2, shard="full", vocab_size=17, pad_vocab_to=64, ddp=True)
    with one_of(4, 3, config, "cpu"):
        attention = build(config)[0].blocks[1].attention
        assert attention.qkv.weight.to_local().shape == (3 * 8, 32)
        assert attention.proj.weight.to_local().shape == (16, 16)


def step_of_muon(config, world_size, rank, counter):
    """Takes a step of Muon in a simulated process, seen by the counter. Returns the shapes of the matrices."""
    with one_of(world_size, rank, config, "cpu"):
        model, optimizer, _ = build(config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with counter:
            optimizer.step()
        return {parameter.shape for parameter in model.blocks.parameters() if parameter.dim() == 2}


EIGHT = {"n_layer": 8, "n_head": 4, "n_embd": 48, "vocab_size": 64, "ddp": True, "optimizer": "muon"}


@pytest.mark.parametrize(
    ("keys", "exchanges", "gathers"),
    [
        ({"shard": "full"}, 2, 0),
        ({"shard": "optimizer"}, 2, 0),
        ({"shard": "hybrid"}, 2, 1),
        ({"tensor_parallel": 2}, 2, 1),
        ({"tensor_parallel": 2, "shard": "full"}, 2, 0),
        ({"context_parallel": 2}, 0, 1),
        ({}, 0, 1),
    ],
    ids=str,
)
def test_muon_sends_every_matrix_to_its_owner_and_back_and_to_other_copies(keys, exchanges, gathers):
    counter = Counter()
    shapes = step_of_muon(tiny(**EIGHT, **keys), 16, 3, counter)
    calls = {kind: calls for kind, (calls, _) in counter.sent.items()}
    expected = {"all_to_all": exchanges * len(shapes), "all_gather": gathers * len(shapes)}
    assert calls == {kind: number for kind, number in expected.items() if number}


@pytest.mark.parametrize("keys", [{}, {"context_parallel": 2}, {"shard": "full"}], ids=str)
def test_each_process_orthogonalizes_its_share_of_the_matrices(keys):
    flops = []
    for world_size, rank in [(1, 0), (8, 0), (8, 3), (8, 7)]:
        counter = FlopCounterMode(display=False)
        step_of_muon(tiny(**EIGHT, **(keys if world_size > 1 else {})), world_size, rank, counter)
        flops.append(counter.get_total_flops())
    alone, *shares = flops
    assert alone > 0 and shares == [alone / 8] * 3


def test_owners_take_turns():
    """Two processes with five matrices, of which another call handled the first: each computes its share."""
    owned = []
    for rank in range(2):
        config = tiny(shard="full", ddp=True)
        with one_of(2, rank, config, "cpu"):
            like = build(config)[0].blocks[0].mlp.fc.weight
            shards = [parallel.local(like).detach()] * 5
            parallel.map_matrices(lambda matrices: owned.append(len(matrices)) or matrices, shards, like, first=1)
    assert owned == [2, 3]


PIPELINE = {"pipeline_parallel": 2, "n_layer": 4, "vocab_size": 17, "ddp": True}
INTERLEAVED = {**PIPELINE, "pipeline_schedule": "interleaved"}
HALF = {**INTERLEAVED, "dtype": "bfloat16", "half_residual": True}


def tokens_and_targets():
    return torch.randint(17, (2, 4, 16), generator=torch.Generator().manual_seed(0)).unbind()


def evaluate_pipelines(folder, rows):
    """Loss of a batch of two micro-batches in each pipeline, and bytes that this process sends.

    The last process does not end its first micro-batch before the first process has begun its second.
    """
    losses, sent = [], []
    for number, keys in enumerate(rows):
        config = tiny(**keys)
        model, begun = train.build_model(config, train.set_up(config)), []

        def meet(*_, model=model, begun=begun, number=number):
            begun.append(1)
            if model.has_first:
                (folder / f"{number}: {len(begun)}").touch()
                return
            deadline = time.monotonic() + 60
            while not (folder / f"{number}: 2").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)

        for part in model.parts:
            part.register_forward_pre_hook(meet)
        with torch.no_grad(), Counter() as counter:
            losses.append(model(*tokens_and_targets()).item())
        sent.append(counter.sent["send"][1])
    return losses, sent


@pytest.mark.slow
def test_an_evaluation_has_a_micro_batch_in_every_process_of_a_pipeline(tmp_path):
    rows = [PIPELINE, INTERLEAVED, HALF]
    (first, sent), (last, _) = run_together(evaluate_pipelines, tmp_path, rows, n=2, folder=tmp_path)
    losses = [GPT(tiny(**keys))(*tokens_and_targets()).item() for keys in rows[:2]]
    assert first == [0, 0, 0] and last[:2] == pytest.approx([2 * loss for loss in losses], rel=1e-6)
    assert last[2] == pytest.approx(last[1], rel=1e-3)
    assert sent[1] - sent[2] == 2 * 2 * 4 * 16 * 32  # bytes of a batch that leaves two stages, 2 less a number


@pytest.mark.slow
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(tmp_path):
    """Processes exchange heads, sending q, k, v and y, or gather keys and values; the backward does the reverse."""
    part = 8 * 2 * 4 * 4 * 8  # bytes of 2 sequences, 4 heads, 4 of 16 positions, 8 numbers
    for process in run_together(look_at_context_parallel, n=4, folder=tmp_path):
        assert max(process["heads"]["error"], process["keys"]["error"]) < 1e-14
        assert process["heads"]["sent"] == {"all_to_all": [4, 2 * (3 + 1) * part]}
        assert process["keys"]["sent"] == {"all_gather": [1, 4 * part], "reduce_scatter": [1, 4 * part]}
