"""Under every layout, several gloo processes train the same model as one, and resume each other's checkpoints."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    RECIPE,
    UNCUT,
    assert_same_state,
    replace,
    rows,
    saved,
    weights,
    words,
    write_folder,
    write_state,
)
from processes import configuration, work
from torch.utils._pytree import tree_map

import train
from nanoladder import checkpoint
from nanoladder.arithmetic import CUTS

pytestmark = pytest.mark.slow

CURVE = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr"
TENSOR, CONTEXT, PIPELINE = {"tensor_parallel": 2}, {"context_parallel": 2}, {"pipeline_parallel": 2}
INTERLEAVED = {**PIPELINE, "pipeline_schedule": "interleaved"}
LAYOUT = {"shard": "none", "tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1}
SGD = {"optimizer": "sgd", "grad_clip": 0.05}  # linear in the gradient: detects wrong scales, which AdamW hides
PARTS = {"batch_size": 8, "micro_batch_size": 2}
SEPARATE = {"qk_norm": True, "key_offset": True, "split_qkv": True, "polar_express": True}  # rungs inside the blocks
HALF = {"dtype": "bfloat16", "half_residual": True, "attention": "sdpa"}
AT_THE_END = {"eval_interval": 6, "lazy_metrics": True}

# Trained by several processes, and by one without the keys of LAYOUT; tiny() is float32, 6 steps of 4 sequences.
TWO = {
    "ddp": {"eval_interval": 3, "eval_windows": 0},
    "micro-batches": {"data": "documents", "batch_size": 8, "micro_batch_size": 1, "set_to_none": False},
    "recomputed": {"activation_checkpointing": "every:1", "attention": "sdpa", "loss_chunks": 3, "pad_vocab_to": 64},
    "loader": {"num_workers": 1, "adamw_impl": "fused", "lazy_metrics": True},
    "float16": {"dtype": "float16", "micro_batch_size": 1},
    "optimizer": {"shard": "optimizer", "eval_interval": 3, "batch_size": 8, "micro_batch_size": 1},
    "full": {"shard": "full", "data": "documents", "sample_interval": 6, "adamw_impl": "fused"},
    "full recomputed": {"shard": "full", "activation_checkpointing": "sqrt", **PARTS},
    "full selective": {
        "shard": "full",
        "activation_checkpointing": "selective",
        "attention": "sdpa",
        "set_to_none": False,
    },
    "full float16": {"shard": "full", "dtype": "float16", "attention": "sdpa"},
    "compiled": {"compile": True, "n_layer": 1, "loss_chunks": 2, "eval_interval": 6},
    "full compiled": {"compile": True, "n_layer": 1, "shard": "full", "activation_checkpointing": "every:1"},
    "tensor": {**TENSOR, **SGD, "bias": True, "eval_interval": 2, "eval_windows": 0, "sample_interval": 6},
    "tensor chunks": {**TENSOR, "adamw_impl": "fused", "pad_vocab_to": 64, "attention": "sdpa", "loss_chunks": 3},
    "tensor documents": {
        **TENSOR,
        "data": "documents",
        **PARTS,
        "activation_checkpointing": "selective",
        "attention": "sdpa",
    },
    "tensor bfloat16": {**TENSOR, "dtype": "bfloat16", "attention": "sdpa", "loss_chunks": 2},
    "tensor float16": {**TENSOR, "dtype": "float16", "attention": "sdpa"},
    "context": {**CONTEXT, "data": "documents", **PARTS, "attention": "sdpa", "eval_interval": 3, "num_workers": 1},
    "context matmul": {**CONTEXT, "attention": "matmul", "context_length": 30, "activation_checkpointing": "sqrt"},
    "context compiled": {**CONTEXT, "compile": True, "n_layer": 1, "attention": "sdpa"},
    "pipeline": {**PIPELINE, **PARTS, "data": "documents", "sample_interval": 6, "eval_interval": 3},
    "pipeline interleaved": {**INTERLEAVED, **PARTS, "n_layer": 5, "activation_checkpointing": "sqrt", **AT_THE_END},
    "pipeline odd": {**PIPELINE, "n_layer": 3, "batch_size": 6, "micro_batch_size": 2, "pad_vocab_to": 48},
    "pipeline bfloat16": {**PIPELINE, **PARTS, "dtype": "bfloat16"},
    "bfloat16 stream, full": {**HALF, "shard": "full"},
    "bfloat16 stream, tensor": {**HALF, **TENSOR, "loss_chunks": 2},
    "bfloat16 stream, context": {**HALF, **CONTEXT, "activation_checkpointing": "every:1"},
    "bfloat16 stream, pipeline": {**HALF, **INTERLEAVED, **PARTS, "n_layer": 4, "eval_interval": 2},
    "pipeline compiled": {**PIPELINE, **PARTS, "compile": True, "attention": "sdpa"},
    "recipe muon": {**RECIPE, "eval_interval": 3},
    "recipe muon full": {
        **RECIPE,
        "shard": "full",
        "activation_checkpointing": "every:1",
        "pad_vocab_to": 64,
        "loss_chunks": 2,
    },
    "recipe muon tensor": {**UNCUT, **TENSOR, "pad_vocab_to": 64},
    "recipe context": {**RECIPE, **SGD, **CONTEXT, "learning_rate": 3e-3, "attention": "sdpa"},
    "muon context": {**CONTEXT, **SEPARATE, "optimizer": "muon", "attention": "sdpa"},
    "recipe gathered": {**RECIPE, **SGD, **CONTEXT, "learning_rate": 3e-3, "attention": "sdpa", "n_head": 1},
    "float8 full": {"float8": True, "shard": "full", "activation_checkpointing": "selective", "attention": "sdpa"},
    "float8 pipeline": {"float8": True, **PIPELINE, **PARTS},
    "float8 context": {"float8": True, **CONTEXT, "context_length": 32, "attention": "sdpa"},
    "sgd": {**SGD, "shard": "full"},
    "adafactor": {"optimizer": "adafactor"},
    "galore": {"optimizer": "galore"},
    "lion": {**TENSOR, "optimizer": "lion"},
    "muon pipeline": {**PIPELINE, **PARTS, **SEPARATE, "optimizer": "muon"},
    "adamw8bit full": {"optimizer": "adamw8bit", "n_embd": 96, "pad_vocab_to": 64, "shard": "full"},
    "adamw8bit context": {**CONTEXT, "optimizer": "adamw8bit", "n_embd": 96, "pad_vocab_to": 64, "attention": "sdpa"},
    "adamw8bit pipeline": {**PIPELINE, **PARTS, "optimizer": "adamw8bit", "n_embd": 96, "pad_vocab_to": 64},
}
# relative, of losses; 1e-4 for the others
LOOSE = {"float16": 5e-3, "bfloat16": 2e-2, "float8": 2e-2, "adamw8bit": 1e-2, "muon": 1e-3}


def tolerance(name):
    return next((value for word, value in LOOSE.items() if word in name), 1e-4)


def agree(ours, theirs, tolerance=1e-4):
    """Asserts that two runs logged the same curve and ended with the same weights."""
    ours, theirs = ((rows(of, *CURVE), rows(of, "grad_norm"), weights(of)) for of in (ours, theirs))
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert one == pytest.approx(other, rel=20 * tolerance)
    assert ours[2].keys() == theirs[2].keys()
    for name, weight in ours[2].items():
        torch.testing.assert_close(weight, theirs[2][name], rtol=0, atol=10 * tolerance, msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(dense, documents, folder):
    """alone(keys) -> run of one process with these keys but without a layout, trained once."""
    runs = {}

    def find(keys):
        keys = {key: value for key, value in keys.items() if key not in LAYOUT and key != "compile"}
        name = str(sorted(keys.items()))
        if name not in runs:
            runs[name] = configuration(dense, documents, folder / "alone" / str(len(runs)), **keys)
            train.train(runs[name])
        return runs[name]

    return find


def together(folder, runs, n, **jobs):
    """Trains the runs, {name: config}, and does other jobs in n processes. Returns stdout and each rank's results."""
    result, seen = work(folder, {name: {"argv": words(run)} for name, run in runs.items()} | jobs, n)
    assert result.returncode == 0, result.stderr
    assert not [process[name]["error"] for process in seen for name in runs if process[name]["error"]]
    said = [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]  # by the compiler
    assert not said
    return result.stdout, seen


def test_two_processes_train_the_same_model_as_one(dense, documents, folder, alone, subtests):
    """One test, like that of resuming: if it were spread over pytest's workers, each of them would train all runs."""
    runs = {name: configuration(dense, documents, folder / "two" / name, **keys) for name, keys in TWO.items()}
    printed, seen = together(folder / "of two", runs, 2)
    for name, keys in TWO.items():
        with subtests.test(name):
            agree(runs[name], alone(keys), tolerance(name))
    for name, config in runs.items():
        if "tensor" not in name and "pipeline" not in name and name != "lion":
            groups = config.n_layer + 1 if config.shard != "none" else 1  # the model fits one bucket
            micro_batches = 2 if name == "full recomputed" else 1  # without whole gradients that wait
            with subtests.test(f"{name}: gradients are reduced once a step, or shard=full's in each micro-batch"):
                assert {process[name]["reductions"] for process in seen} == {6 * groups * micro_batches}
    with subtests.test("only the first process writes and prints"):
        for config in runs.values():
            names = {path.name for path in Path(config.out_dir).iterdir()}
            assert {"config.json", "metrics.jsonl", "last.safetensors"} <= names
            assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5, 6]
        assert printed.count("step 6  sample\n") == sum(config.sample_interval == 6 for config in runs.values()) == 3
        assert printed.count("parameters:") == printed.count("processes 2 by gloo") == len(runs)
        assert [line for line in printed.splitlines() if len(line) > 80 and str(folder) not in line] == []
        assert "processes 2 by gloo = 2 pipeline, shard=none" in printed
    with subtests.test("CPU threads are divided among the processes"):
        assert {process["ddp"]["threads"] for process in seen} == {max(1, os.cpu_count() // 2)}


def test_agree_rejects_another_curve(alone):
    """The comparison must detect this difference."""
    with pytest.raises(AssertionError):
        agree(alone(TWO["ddp"]), alone(TWO["float16"]))


# -- checkpoints

BASE = {**PARTS, "attention": "sdpa", "adamw_impl": "fused", "save_interval": 3, "eval_interval": 3}
LAYOUTS = {
    "ddp": {},
    "optimizer": {"shard": "optimizer"},
    "full": {"shard": "full"},
    "tensor": TENSOR,
    "context": CONTEXT,
    "pipeline": PIPELINE,
}
EXACT = {  # layouts that resume bit for bit, with another dropout in each process
    **LAYOUTS,
    "muon": {"optimizer": "muon", "shard": "full"},
    "lion": {"optimizer": "lion", **TENSOR},
    "adamw8bit": {"optimizer": "adamw8bit", "n_embd": 96, "pad_vocab_to": 64, "shard": "full"},
}


def stop_and_resume(dense, documents, folder):
    """Trains runs that resume after 3 of 6 steps, as if killed. Returns {name: config} and each rank's results."""
    folder = folder / "resumed"
    half = {"max_steps": 3, "lr_decay_steps": 6}
    base = configuration(dense, documents, folder / "alone", **BASE)
    runs = {"alone": base, "alone_first": replace(base, out_dir=f"{folder}/alone_first", **half)}
    jobs = {}
    for run in runs.values():
        train.train(run)

    def add(name, config, source=None, **keys):
        runs[name] = replace(config, out_dir=f"{folder}/{name}", **keys)
        jobs[name] = {"argv": words(runs[name])}
        if source:
            jobs[name]["copy"] = [f"{folder}/{source}", f"{folder}/{name}"]

    for name, keys in EXACT.items():
        dropping = configuration(dense, documents, folder, **{**BASE, "dropout": 0.2, **keys})
        add(f"dropping_{name}", dropping)
        add(f"dropping_{name}_resumed", dropping, f"dropping_{name}", init_from="resume")
        jobs[f"dropping_{name}_resumed"]["without"] = ["last.*", "best.*", "step_00000006.*"]
    shutil.copytree(folder / "alone_first", folder / "damaged_first")
    (folder / "damaged_first" / "last.safetensors").write_bytes(b"")
    add("damaged", base, "damaged_first", shard="full", init_from="auto")
    add("new", base, init_from=f"{folder}/alone/last.safetensors", max_steps=1, **PIPELINE)
    printed, seen = together(folder, {}, 2, **jobs, **differing(base, folder))
    assert not [process[name]["error"] for process in seen for name in jobs if process[name]["error"]]
    assert printed.count("damaged/last.safetensors is damaged") == 1
    continued = printed.count("/step_00000003.safetensors, step 3, as it was configured")
    assert continued == len(EXACT) + 1  # including the damaged one
    return runs, seen


def differing(base, folder):
    """Jobs whose second process has another config, other data, or another checkpoint."""
    facts = {"argv": words(replace(base, out_dir=str(folder / "differing")))}
    jobs = {"config": facts | {"rank_1": {"argv": ["--learning_rate=0.5"]}}}
    for number in (0, 1):
        write_folder(folder / str(number) / "node_data", [number] * 500, [0] * 100, 256)
        copy = shutil.copytree(folder / "alone_first", folder / str(number) / "differing")
        state = checkpoint.load(copy / "last.safetensors")
        state["progress"]["interval_loss"] += number
        write_state(copy / "last.safetensors", state)
    nodes = {"cwd": str(folder / "0"), "rank_1": {"cwd": str(folder / "1")}}
    jobs["data"] = {"argv": [*facts["argv"], "--dataset=node_data"], **nodes}
    return jobs | {"checkpoint": {"argv": words(replace(base, out_dir="differing", init_from="resume")), **nodes}}


def test_several_processes_resume_their_checkpoints_and_those_of_one(dense, documents, folder, subtests):
    runs, seen = stop_and_resume(dense, documents, folder)
    for name in EXACT:
        with subtests.test(f"{name}: bit for bit, each process with its own dropout"):
            one, parts = runs[f"dropping_{name}"], runs[f"dropping_{name}_resumed"]
            assert rows(one, *CURVE) == rows(parts, *CURVE)
            assert_same_state(one, parts)
            states = saved(one)["generators"]["cpu"]
            assert len(states) == 2 and not torch.equal(*states)
    for name in LAYOUTS:
        with subtests.test(f"{name}: a checkpoint is whole and has plain names"):
            states = [saved(runs[run]) for run in (f"dropping_{name}", "alone")]
            assert states[0].keys() == states[1].keys()
            for part in ("model", "optimizer"):
                shapes = [tree_map(lambda leaf: getattr(leaf, "shape", leaf), state[part]) for state in states]
                assert shapes[0] == shapes[1]
    with subtests.test("one of one process continues in several, and a damaged one is passed over"):
        agree(runs["damaged"], runs["alone"])
    with subtests.test("its weights start a pipeline"):
        assert rows(runs["new"])[0]["train_loss"] < rows(runs["alone"])[0]["train_loss"] - 0.3
    with subtests.test("what differs between processes is named"):
        for process in seen:
            assert "rank 1 has learning_rate=0.5, rank 0 learning_rate=0.01" in process["config"]["error"]
            assert "in their data: rank 1 has train.bin=500 tokens, digest" in process["data"]["error"]
            assert (
                "checkpoint in differing: rank 1 has interval_loss=1.0, rank 0 interval_loss=0.0"
                in process["checkpoint"]["error"]
            )


def test_four_processes_resume_bit_for_bit(dense, documents, folder):
    """A sum of four numbers, unlike one of two, depends on their order."""
    config = configuration(dense, documents, folder / "four_whole", batch_size=8, bias=True)
    first = replace(config, out_dir=str(folder / "four_parts"), max_steps=3, lr_decay_steps=6)
    rest = replace(first, init_from="resume", max_steps=6)
    together(folder / "four_job", {"whole": config, "first": first, "rest": rest}, 4)
    assert rows(rest, *CURVE, "grad_norm") == rows(config, *CURVE, "grad_norm")
    assert_same_state(rest, config, "model", "optimizer")


# Layouts of four processes: along two dimensions, along one, and variants.
ALONG = {"data": {}, "tensor": TENSOR, "context": CONTEXT, "pipeline": PIPELINE}
FOUR = {f"{one} {other}": ALONG[one] | ALONG[other] for one, other in itertools.combinations(ALONG, 2)}
FOUR |= {f"{name} full": keys | {"shard": "full"} for name, keys in FOUR.items() if name != "tensor pipeline"}
FOUR |= {"optimizer": {"shard": "optimizer"}, "hybrid": {"shard": "hybrid"}}
FOUR |= {"interleaved": INTERLEAVED, "4 data": {}} | {f"4 {key}": {key: 4} for key in CUTS}
ODD = {"n_layer": 4, "n_head": 4, "n_embd": 36, "context_length": 24, "batch_size": 8, "bias": True}
ODD |= {"data": "documents", "vocab_size": 257}  # padded, with heads of 9
ODD |= {"learning_rate": 1e-3, "min_lr": 1e-4, "lr_decay_steps": 40}  # keeps a long chain of runs near its beginning


def test_every_layout_resumes_the_checkpoint_of_another_like_one_process(dense, documents, folder, subtests):
    """Each trains two steps from the checkpoint of the layout before it, as does one process.

    tests/parallel/worker.py also compares the resumed state with the file.
    """
    runs, jobs = {"first": configuration(dense, documents, folder / "four" / "first", **ODD, max_steps=2)}, {}
    train.train(runs["first"])
    for name, keys in FOUR.items():
        *_, before = runs.values()
        resumed = {"init_from": "resume", "max_steps": before.max_steps + 2}
        runs[name] = configuration(dense, documents, folder / "four" / name, **ODD, **keys, **resumed)
        jobs[name] = {"argv": words(runs[name])}
        if before is runs["first"]:  # the worker needs a process group to copy, which the first job makes
            shutil.copytree(before.out_dir, runs[name].out_dir)
        else:
            jobs[name]["copy"] = [before.out_dir, runs[name].out_dir]
    _, seen = together(folder / "of four", {}, 4, **jobs)
    assert not [process[name]["error"] for process in seen for name in jobs if process[name]["error"]]
    for before, name in itertools.pairwise(runs):
        one = replace(runs[name], out_dir=f"{runs[name].out_dir}, alone", **LAYOUT)
        shutil.copytree(runs[before].out_dir, one.out_dir)
        train.train(one)
        with subtests.test(name):
            agree(runs[name], one, 1e-5)


def test_evaluations_samples_and_saves_in_the_middle_change_no_loss(dense, documents, folder, subtests):
    """One run saves, samples and evaluates, the other evaluates alone; both after different steps."""
    layouts = {"ddp": {}} | {shard: {"shard": shard} for shard in ("optimizer", "full", "hybrid")}
    layouts |= {f"data {name}": ALONG[name] for name in ("tensor", "context", "pipeline")}
    layouts |= {"interleaved": {**INTERLEAVED, "shard": "optimizer", "n_layer": 4}}
    saved = {"save_interval": 2, "sample_interval": 2, "eval_interval": 3}
    evaluated = {"save_interval": 0, "eval_interval": 2}
    runs = {}
    for keys, middle in itertools.product(layouts.values(), (saved, evaluated)):
        keys = {"batch_size": 8, "max_steps": 4, "eval_windows": 8, **keys, **middle}
        number = str(len(runs))
        runs[number] = configuration(dense, documents, folder / "middle" / number, **keys)
    together(folder / "middle of four", runs, 4)
    curves = [rows(run, "train_loss", "grad_norm") for run in runs.values()]
    for name, *both in zip(layouts, curves[::2], curves[1::2], strict=True):
        with subtests.test(name):
            assert both[0] == both[1]


def test_muon_takes_the_steps_of_one_process_however_its_matrices_are_sharded(dense, documents, folder, subtests):
    """Including uneven and empty shards."""
    base = {"optimizer": "muon", "n_head": 2, "n_embd": 18, "n_layer": 3}
    layouts = {"copies": {}, "full": {"shard": "full"}, "hybrid": {"shard": "hybrid"}}
    layouts |= {"tensor": TENSOR, "tensor full": {**TENSOR, "shard": "full"}, "empty": {"shard": "full", "n_embd": 6}}
    layouts |= {"bfloat16 full": {"shard": "full", "dtype": "bfloat16", "n_embd": 6}}
    layouts |= {"bfloat16 copies": {"dtype": "bfloat16"}}
    runs = {
        name: configuration(dense, documents, folder / "muon" / name, **base | keys) for name, keys in layouts.items()
    }
    together(folder / "muon of four", runs, 4)
    for name, run in runs.items():
        one = replace(run, out_dir=f"{run.out_dir}, alone", **LAYOUT)
        train.train(one)
        with subtests.test(name):
            agree(run, one, tolerance(name))


# -- GPUs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("keys", [{}, {"shard": "full"}, {"compile": True}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_gpus_train_the_same_model_as_one(dtype, keys, dense, documents, tmp_path):
    given = {"device": "cuda", "dtype": dtype, "attention": "sdpa", "set_to_none": True, "n_embd": 128}
    config = configuration(dense, documents, tmp_path / "alone", **given, context_length=64)
    train.train(config)
    ours = replace(config, out_dir=str(tmp_path / "two"), **keys)
    printed, _ = together(tmp_path / "work", {"job": ours}, 2)
    assert "processes 2 by nccl" in printed
    agree(ours, config, 5e-3)
