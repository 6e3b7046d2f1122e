"""Tensor parallelism: two and four processes, on gloo, share the matrices and sequences of a model."""

import json
import math
import shutil

import pytest
import torch
from conftest import ROOT, replace, rows, same, saved, tiny
from processes import configuration, words, work

import sample
import train
from nanoladder.errors import BadInput
from nanoladder.parallel import check
from nanoladder.parallel.mesh import Grid, Mesh

pytestmark = pytest.mark.slow

CURVE = "step", "tokens", "train_loss", "val_loss", "grad_norm"
SIZES = {"n_head": 4, "bias": True, "tensor_parallel": 2, "max_steps": 4}

# SGD, whose update is linear in the gradient, is exact, and tells apart what AdamW scales alike. Every norm is clipped.
SGD = {"optimizer": "sgd", "grad_clip": 0.05}

# What one process trains, and groups of tensor parallel ones
CURVES = {
    "odd": {**SGD, "eval_interval": 2, "eval_windows": 0},
    "adamw": {"adamw_impl": "fused", "pad_vocab_to": 64, "attention": "sdpa", "loss_chunks": 3, "bias": False},
    "parts": {"data": "documents", "batch_size": 8, "micro_batch_size": 1, "set_to_none": False, "bias": False},
    "recomputed": {"checkpointing": "every:1", "adamw_impl": "foreach"},
    "selective": {"checkpointing": "selective", "attention": "sdpa"},
    "lion": {"optimizer": "lion", "bias": False},  # with biases, the sign of gradients of exactly 0 is noise
    "muon": {"optimizer": "muon"},
    "float16": {"dtype": "float16", "attention": "sdpa"},
    "bfloat16": {"dtype": "bfloat16", "attention": "sdpa", "loss_chunks": 2},
}
LAYOUTS = {  # of four processes
    "both": {"tensor_parallel": 4, **SGD},
    "data": SGD,
    "optimizer": {"shard": "optimizer", "batch_size": 8, "micro_batch_size": 2, **SGD},
    "full": {"shard": "full", "adamw_impl": "fused", "checkpointing": "every:1"},
    "hybrid": {"shard": "full", "shard_within": 1, **SGD},
}
REFUSED = {
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "galore": {"optimizer": "galore"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def configured(dense, documents, folder):
    return lambda out_dir, **keys: configuration(dense, documents, folder / out_dir, **{**SIZES, **keys})


@pytest.fixture(scope="module")
def alone(configured):
    """What one process makes of every configuration: {name: config of the finished run}."""
    runs = {}
    for name, keys in (CURVES | LAYOUTS).items():
        runs[name] = configured(f"alone/{name}", **{**keys, "shard": "none"})
        train.train(runs[name])
    first = replace(runs["odd"], out_dir=f"{runs['odd'].out_dir}_first", max_steps=2, lr_decay_steps=4)
    train.train(first)
    runs["odd_first"] = first
    return runs


def looking(config, checkpoint, out_dir, **keys):
    """The job of tests/parallel/parts.py, with a checkpoint to load."""
    config = replace(config, out_dir=out_dir, init_from=f"{checkpoint.out_dir}/last.safetensors", dropout=0.5, **keys)
    return {"argv": words(config), "program": str(ROOT / "tests/parallel/parts.py")}


@pytest.fixture(scope="module")
def two(alone, configured, folder):
    """The same by two processes: ({name: config}, {job: what each process saw}, result)."""
    runs = {name: configured(f"two/{name}", **keys) for name, keys in (CURVES | REFUSED).items()}
    half = {"max_steps": 2, "lr_decay_steps": 4}
    runs["first"] = replace(runs["odd"], out_dir=f"{folder}/two/first", **half)
    runs["dropping"] = configured("two/dropping", dropout=0.2)
    runs["dropping_first"] = replace(runs["dropping"], out_dir=f"{folder}/two/dropping_first", **half)
    jobs = {name: {"argv": words(config)} for name, config in runs.items()}
    for name, first, keys in [
        ("tensor to tensor", runs["first"], {}),
        ("tensor to data", runs["first"], {"tensor_parallel": 1}),
        ("tensor to shards", runs["first"], {"tensor_parallel": 1, "shard": "full"}),
        ("one to tensor", alone["odd_first"], {}),
        ("dropping_resumed", runs["dropping_first"], {}),
    ]:
        runs[name] = replace(first, out_dir=f"{folder}/two/{name}", max_steps=4, init_from="resume", **keys)
        jobs[name] = {"argv": words(runs[name]), "copy": [first.out_dir, runs[name].out_dir]}
    runs["fault"] = replace(runs["odd"], out_dir=f"{folder}/two/fault")
    jobs["fault"] = {"argv": words(runs["fault"]), "program": str(ROOT / "tests/parallel/unordered.py")}
    for name in ("odd", "adamw"):
        jobs[f"looked {name}"] = looking(runs[name], alone[name], f"{folder}/two/looked {name}")
    result, seen = work(folder / "two", jobs, 2)
    assert result.returncode == 0, result.stderr
    return runs, {name: [process[name] for process in seen] for name in jobs}, result


@pytest.fixture(scope="module")
def four(alone, configured, folder):
    """The layouts of four processes: {name: config}."""
    runs = {name: configured(f"four/{name}", **keys) for name, keys in LAYOUTS.items()}
    jobs = {name: {"argv": words(config)} for name, config in runs.items()}
    jobs["looked full"] = looking(runs["full"], alone["full"], f"{folder}/four/looked full")
    result, _ = work(folder / "four", jobs, 4)
    assert result.returncode == 0, result.stderr
    return runs


def looked(folder, n):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


def differences(ours, theirs, path=""):
    """{path: largest difference} of the tensors in two nested dicts of the same structure."""
    assert ours.keys() == theirs.keys(), path
    found = {}
    for key, value in ours.items():
        if isinstance(value, dict):
            found |= differences(value, theirs[key], f"{path}{key}.")
        elif isinstance(value, torch.Tensor):
            assert value.shape == theirs[key].shape, f"{path}{key}"
            found[path + key] = (value - theirs[key]).abs().max().item()
    return found


def agree(ours, theirs, of_curves=1e-4, of_weights=1e-4):
    """Asserts equal curves, and equal gathered weights and optimizer states, to a tolerance."""
    for one, other in zip(rows(ours, *CURVE), rows(theirs, *CURVE), strict=True):
        assert one == pytest.approx(other, rel=of_curves)
    for part in ("model", "optimizer"):
        found = differences(saved(ours)[part], saved(theirs)[part])
        assert max(found.values()) < of_weights, max(found, key=found.get)


# SGD is exact; AdamW and Muon amplify small gradients. The products of Muon may be in bfloat16.
TOLERANCES = {"odd": (1e-5, 1e-6), "muon": (1e-3, 2e-2), "float16": (5e-3, 5e-2), "bfloat16": (2e-2, 5e-2)}


@pytest.mark.parametrize("name", CURVES)
def test_two_processes_train_the_weights_that_one_does(name, alone, two):
    runs, _, _ = two
    agree(runs[name], alone[name], *TOLERANCES.get(name, ()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_four_processes_train_the_weights_that_one_does(name, alone, four):
    agree(four[name], alone[name], *TOLERANCES.get("full" if name == "full" else "odd", ()))


def test_the_comparison_sees_rows_of_qkv_in_the_order_of_the_processes(alone, two):
    """The fault shows neither in the losses nor in the norms."""
    runs, _, _ = two
    ours, theirs = runs["fault"], alone["odd"]
    for one, other in zip(rows(ours, *CURVE), rows(theirs, *CURVE), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    with pytest.raises(AssertionError, match=r"attention\.qkv"):
        agree(ours, theirs)


def test_nothing_is_said_on_standard_error(two):
    _, _, result = two
    assert result.stderr == ""


# -- what a process has


@pytest.mark.parametrize("name", ["odd", "adamw"])
def test_a_process_has_half_of_every_matrix(name, two, folder):
    for rank, found in enumerate(looked(folder / "two" / f"looked {name}", 2)):
        shapes = found["shapes"]
        rows_of_vocabulary = (9, 8)[rank] if name == "odd" else 32  # of 17 and 64
        assert shapes["token_embedding.weight"] == [rows_of_vocabulary, 32] and found["tied"]
        assert shapes["blocks.1.attention.qkv.weight"] == [3 * 16, 32]
        assert shapes["blocks.1.attention.proj.weight"] == [32, 16]
        assert shapes["blocks.1.mlp.fc.weight"] == [64, 32]
        assert shapes["blocks.1.mlp.proj.weight"] == [32, 64]
        assert found["bytes"] == {name: 4 * math.prod(shape) for name, shape in shapes.items()}  # no views of the whole


def test_sharding_cuts_the_parts_once_more(four, folder):
    for found in looked(folder / "four" / "looked full", 4):
        assert found["shapes"]["blocks.1.attention.qkv.weight"] == [3 * 8, 32]
        assert found["shapes"]["blocks.1.attention.proj.weight"] == [16, 16]
        assert found["model"] and found["optimizer"]


def test_a_process_has_half_of_the_sequence_or_of_the_heads(two, folder):
    for found in looked(folder / "two" / "looked odd", 2):
        for name in ("blocks.0.attention_norm", "blocks.0.mlp", "norm"):
            assert found["sizes"][name] == [4, 8, 32]  # (B, T / 2, C)
        assert found["sizes"]["q"] == [4, 2, 16, 8]  # (B, nh / 2, T, hs)


def test_no_process_has_logits_of_the_whole_vocabulary_or_of_more_than_a_chunk(two, folder):
    for rank, found in enumerate(looked(folder / "two" / "looked odd", 2)):
        assert {tuple(shape) for shape in found["logits"]} == {(64, 9 - rank)}
    for found in looked(folder / "two" / "looked adamw", 2):  # 3 chunks
        assert {tuple(shape) for shape in found["logits"]} == {(22, 32), (20, 32)}


def test_a_block_exchanges_its_activations_eight_times(two, folder):
    """Around two blocks, the embedding and the loss take two exchanges of each kind."""
    for found in looked(folder / "two" / "looked adamw", 2):
        gradients = {"all_reduce 1": 2 * 2 + 1, "all_reduce 2": 1}  # of norms and positions
        assert found["collectives"] == {"all_gather 3": 4 * 2 + 2, "reduce_scatter 3": 4 * 2 + 2, **gradients}


def test_each_part_of_a_sequence_is_dropped_by_its_own_mask(two, folder):
    one, other = (torch.tensor(found["dropped"]) for found in looked(folder / "two" / "looked odd", 2))
    assert one.shape == other.shape == (1, 4, 8, 32) and 0.4 < (one == other).float().mean() < 0.6


# -- checkpoints


@pytest.mark.parametrize("name", ["tensor to tensor", "tensor to data", "tensor to shards", "one to tensor"])
def test_a_checkpoint_continues_under_another_layout(name, alone, two):
    runs, _, _ = two
    agree(runs[name], alone["odd"], *TOLERANCES["odd"])


def test_a_checkpoint_of_tensor_parallel_processes_continues_in_one(alone, two, tmp_path):
    runs, _, _ = two
    run = replace(runs["first"], out_dir=str(tmp_path / "run"), max_steps=4, init_from="resume")
    shutil.copytree(runs["first"].out_dir, run.out_dir)
    train.train(run)
    agree(run, alone["odd"], *TOLERANCES["odd"])


def test_loaded_and_gathered_again_a_checkpoint_is_the_same_bit_for_bit(two, folder):
    for name in ("odd", "adamw"):
        found = looked(folder / "two" / f"looked {name}", 2)[0]
        assert found["model"] and found["optimizer"]


def test_a_run_with_dropout_resumes_bit_for_bit(two):
    runs, _, _ = two
    one, parts = saved(runs["dropping"]), saved(runs["dropping_resumed"])
    assert all(same(one[part], parts[part]) for part in ("model", "optimizer", "generators", "progress"))


def test_sample_reads_a_checkpoint_of_tensor_parallel_processes(two, run_main):
    runs, _, _ = two
    words = "--prompt=the", "--max_new_tokens=3", "--checkpoint=last", "--temperature=0", "--device=cpu"
    result = run_main(sample.main, f"--out_dir={runs['odd'].out_dir}", *words)
    assert result.code == 0 and result.out.startswith("the"), result.err


# -- refusals


def test_what_cannot_be_cut_is_refused(two):
    _, seen, _ = two
    for name, keys in REFUSED.items():
        for process in seen[name]:
            line = process["error"]
            assert all(f"{key}={value}" in line for key, value in keys.items()) and "tensor_parallel=2" in line
            assert "expected" in line and "\n" not in line


def test_a_vocabulary_that_leaves_a_process_no_row_is_refused(monkeypatch):
    monkeypatch.setattr(check, "mesh", lambda: Mesh(Grid(tensor=4)))
    with pytest.raises(BadInput, match=r"vocab_size=5: .* tensor_parallel=4.* expected --pad_vocab_to=4"):
        check.check_tensor_parallel(tiny(vocab_size=5, pad_vocab_to=1))
    check.check_tensor_parallel(tiny(vocab_size=5, pad_vocab_to=4))
    check.check_tensor_parallel(tiny(vocab_size=7, pad_vocab_to=1))
