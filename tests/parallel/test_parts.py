"""What a process of a tensor or context group has, keeps and sends: weights, activations, logits, collectives."""

import json
import math

import pytest
import torch
from conftest import ROOT, tiny
from processes import configuration, script, words, work

import train
from nanoladder.parallel import context

pytestmark = pytest.mark.slow

KEYS = {
    "plain": {"bias": True},
    "chunks": {"pad_vocab_to": 64, "loss_chunks": 3, "attention": "sdpa"},
    "shards": {"shard": "full", "pad_vocab_to": 64},
}


@pytest.fixture(scope="module")
def looked(dense, documents, tmp_path_factory):
    """looked[name]: what each process of parts.py saw; of the last, four processes."""
    folder, found = tmp_path_factory.mktemp("parts"), {}
    for n, names in ((2, ("plain", "chunks")), (4, ("shards",))):
        jobs = {}
        for name in names:
            keys = {"n_head": 4, "tensor_parallel": 2, "dropout": 0.5, **KEYS[name]}
            config = configuration(dense, documents, folder / name, **keys)
            jobs[name] = {"argv": words(config), "program": str(ROOT / "tests/parallel/parts.py")}
        result, _ = work(folder / str(n), jobs, n)
        assert result.returncode == 0 and result.stderr == ""
        for name in names:
            found[name] = [json.loads((folder / name / f"{rank}.json").read_text()) for rank in range(n)]
    return found


def test_a_process_has_half_of_every_matrix(looked):
    for name in ("plain", "chunks"):
        for rank, found in enumerate(looked[name]):
            shapes = found["shapes"]
            rows_of_vocabulary = (9, 8)[rank] if name == "plain" else 32  # of 17 and 64
            assert shapes["token_embedding.weight"] == [rows_of_vocabulary, 32] and found["tied"]
            assert shapes["blocks.1.attention.qkv.weight"] == [3 * 16, 32]
            assert shapes["blocks.1.attention.proj.weight"] == [32, 16]
            assert shapes["blocks.1.mlp.fc.weight"] == [64, 32]
            assert shapes["blocks.1.mlp.proj.weight"] == [32, 64]
            numbers = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
            assert found["bytes"] == numbers  # no views of the whole
    for found in looked["shards"]:  # cut once more
        assert found["shapes"]["blocks.1.attention.qkv.weight"] == [3 * 8, 32]
        assert found["shapes"]["blocks.1.attention.proj.weight"] == [16, 16]


def test_a_process_has_half_of_the_sequence_or_of_the_heads_and_a_chunk_of_its_logits(looked):
    for rank, found in enumerate(looked["plain"]):
        for name in ("blocks.0.attention_norm", "blocks.0.mlp", "norm"):
            assert found["sizes"][name] == [4, 8, 32]  # (B, T / 2, C)
        assert found["sizes"]["q"] == [4, 2, 16, 8]  # (B, nh / 2, T, hs)
        assert {tuple(shape) for shape in found["logits"]} == {(64, 9 - rank)}
    for found in looked["chunks"]:  # 3 chunks
        assert {tuple(shape) for shape in found["logits"]} == {(22, 32), (20, 32)}


def test_a_block_exchanges_its_activations_eight_times(looked):
    """Around two blocks, the embedding and the loss take two exchanges of each kind."""
    for found in looked["chunks"]:
        gradients = {"all_reduce 1": 2 * 2 + 1, "all_reduce 2": 1}  # of norms and positions
        assert found["collectives"] == {"all_gather 3": 4 * 2 + 2, "reduce_scatter 3": 4 * 2 + 2, **gradients}


def test_each_part_of_a_sequence_is_dropped_by_its_own_mask(looked):
    one, other = (torch.tensor(found["dropped"]) for found in looked["plain"])
    assert one.shape == other.shape == (1, 4, 8, 32) and 0.4 < (one == other).float().mean() < 0.6


# -- sequences shared by four processes, which exchange heads or gather keys


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What each of 4 processes saw in attention.py."""
    folder = tmp_path_factory.mktemp("attention")
    result = script("tests/parallel/attention.py", folder, n=4, folder=folder)
    assert result.returncode == 0, result.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_attention_and_its_gradients_are_those_of_the_whole_sequence(four):
    for process in four:
        assert max(process["heads"]["errors"] + process["keys"]["errors"]) < 1e-14  # of output, dq, dk, dv in float64


def test_a_block_exchanges_as_often_and_as_much_as_the_stage_says(four):
    sent = {"heads": 4 * 2 * 16 * 32 // 4 * 3 // 4, "keys": 2 * 2 * 16 * 16 // 4 * 3}  # 2 sequences of 16, width 8·nh
    for process in four:
        heads, keys = process["heads"], process["keys"]
        assert heads["counts"] == {"all_to_all_single": 4}
        assert heads["forward"] == heads["backward"] == {"all_to_all_single": sent["heads"]}
        assert keys["counts"] == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert keys["forward"]["all_gather_into_tensor"] == keys["backward"]["reduce_scatter_tensor"] == sent["keys"]


def test_activations_fall_with_the_number_of_processes(four):
    """A block keeps 16 numbers for a token and channel; gathered keys and values are 2 from each other process."""
    for kind, expected in (("heads", 1 / 4), ("keys", (16 + 2 * 3) / (4 * 16))):
        for process in four:
            whole, part = process["activations"][kind]
            assert part / whole == pytest.approx(expected, rel=0.15)  # outputs are kept before and after an exchange


def test_one_process_has_all_positions_and_its_attention_as_it_was():
    model = train.build_model(tiny(vocab_size=8, context_parallel=2), torch.device("cpu"))
    assert context.positions(model.config) is None
    assert "attend" not in vars(model.blocks[0].attention)
    assert not model.position_embedding._forward_pre_hooks
