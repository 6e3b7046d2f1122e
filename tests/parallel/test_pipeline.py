"""Pipeline parallelism, on gloo: the curve, the weights and the checkpoints of one process."""

import itertools
import re

import pytest
import torch
from conftest import ROOT, replace, rows, same, saved, tiny, weights
from hypothesis import given
from hypothesis import strategies as st
from processes import configuration, words, work
from test_parallel import CURVE, agree

import train
from nanoladder import parallel
from nanoladder.errors import BadInput
from nanoladder.parallel import pipeline
from nanoladder.parallel.mesh import Grid

pytestmark = pytest.mark.slow

BASE = {"data": "documents", "batch_size": 8, "micro_batch_size": 2, "eval_interval": 3}
CURVES = {  # 2 processes
    "1f1b": {"max_steps": 12, "adamw_impl": "fused", "lazy_metrics": True, "set_to_none": True},
    "interleaved": {"pipeline_schedule": "interleaved", "n_layer": 5, "data": "dense", "checkpointing": "sqrt"},
    "shapes": {"n_layer": 3, "batch_size": 6, "pad_vocab_to": 48, "bias": True, "context_length": 15},
    "bfloat16": {"dtype": "bfloat16", "max_steps": 3},
    "muon": {"optimizer": "muon"},
    "adamw8bit": {"optimizer": "adamw8bit", "n_embd": 64, "context_length": 64},
    "compile": {"compile": True, "attention": "sdpa"},
}
WIDE = {  # 4 processes: pipeline × data
    "none": {"adamw_impl": "fused"},
    "full": {"shard": "full", "n_layer": 5, "pipeline_schedule": "interleaved", "save_interval": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def runs(dense, documents, folder):
    """{name: (config of a finished run of one process, config of the same as a pipeline)}"""
    pairs = {}
    for name, keys in (CURVES | WIDE).items():
        config = configuration(dense, documents, folder / "alone" / name, **{**BASE, **keys})
        train.train(replace(config, shard="none", compile=False))
        pairs[name] = config, replace(config, out_dir=str(folder / name), pipeline_parallel=2)
    return pairs


@pytest.fixture(scope="module")
def together(runs, folder):
    """Both numbers of processes: what they printed."""
    printed = ""
    for n, curves in ((2, CURVES), (4, WIDE)):
        jobs = {name: {"argv": words(runs[name][1])} for name in curves}
        result, seen = work(folder / f"work{n}", jobs, n)
        assert result.returncode == 0, result.stderr
        assert {process[name]["error"] for process in seen for name in jobs} == {None}
        printed += result.stdout
    return printed


@pytest.mark.parametrize("name", [*CURVES, *WIDE])
def test_a_pipeline_follows_the_curve_of_one_process_to_the_same_weights(name, runs, together):
    alone, ours = runs[name]
    loose = name in ("bfloat16", "adamw8bit", "muon")
    agree(ours, alone, 1e-3 if loose else 1e-4)
    theirs = weights(alone)
    assert weights(ours).keys() == theirs.keys()
    for weight, tensor in weights(ours).items():
        assert float((tensor - theirs[weight]).abs().max()) < (5e-3 if loose else 2e-4), weight


def test_the_header_shows_the_cut_and_the_bubble(runs, together):
    assert "pipeline  blocks 0 | 1 and the head, 1f1b, 4 micro-batches: bubble 20% of a step predicted" in together
    assert "pipeline  blocks 0 | 1 | 2-3 | 4 and the head, interleaved, 2 micro-batches: bubble 20%" in together
    assert "4 processes = 2 data × 2 pipeline" in together
    assert "compile   the block" in together


# -- checkpoints


@pytest.fixture(scope="module")
def resumed(dense, documents, folder):
    """Runs that stop after 3 of 6 steps and continue otherwise: ({name: config}, config of a run of one process)."""
    folder = folder / "resumed"
    base = configuration(dense, documents, folder / "alone", **{**BASE, "max_steps": 6, "save_interval": 3})
    first = replace(base, max_steps=3, lr_decay_steps=6)
    train.train(base)
    train.train(replace(first, out_dir=str(folder / "alone_first")))
    found, jobs = {}, {}

    def add(name, config, source=None, **job):
        found[name] = replace(config, out_dir=str(folder / name))
        if source:
            found[name], job["copy"] = (
                replace(found[name], init_from="resume"),
                [f"{folder}/{source}", f"{folder}/{name}"],
            )
        jobs[name] = {"argv": words(found[name]), **job}

    stages = {"pipeline_parallel": 2}
    resave = {"program": str(ROOT / "tests" / "parallel" / "resave.py")}
    dropping = replace(base, dropout=0.2, adamw_impl="fused", **stages)
    add("pipeline_first", replace(first, **stages))
    add("pipeline_pipeline", replace(base, **stages), "pipeline_first")
    add("pipeline_data", replace(base, shard="full"), "pipeline_first")
    add("alone_pipeline", replace(base, **stages), "alone_first")
    add("dropping", dropping)
    add("dropping_first", replace(dropping, max_steps=3, lr_decay_steps=6))
    add("dropping_resumed", dropping, "dropping_first")
    add("pipeline_resaved", replace(base, **stages), "pipeline_first", **resave)
    add("alone_resaved", replace(base, **stages), "alone_first", **resave)
    add("resaved_by_shards", replace(base, shard="full"), "pipeline_first", **resave)
    add("new", replace(base, init_from=f"{folder}/alone/last.safetensors", max_steps=1, **stages))
    result, seen = work(folder, jobs, 2)
    assert result.returncode == 0, result.stderr
    assert {process[name]["error"] for process in seen for name in jobs} == {None}
    return found, base


@pytest.mark.parametrize("name", ["pipeline_pipeline", "pipeline_data", "alone_pipeline"])
def test_a_checkpoint_of_a_pipeline_continues_in_others_and_they_in_it(name, resumed):
    found, alone = resumed
    agree(found[name], alone)


def test_a_checkpoint_of_a_pipeline_continues_in_one_process(resumed, tmp_path):
    found, alone = resumed
    ours = replace(alone, out_dir=str(tmp_path), init_from="resume")
    for file in ("last.safetensors", "metrics.jsonl"):
        (tmp_path / file).write_bytes((ROOT / found["pipeline_first"].out_dir / file).read_bytes())
    train.train(ours)
    agree(ours, alone)


@pytest.mark.parametrize("name", ["pipeline_resaved", "alone_resaved", "resaved_by_shards"])
def test_loaded_and_saved_under_another_split_a_checkpoint_is_the_same_bit_for_bit(name, resumed):
    found, _ = resumed
    before, after = saved(found[name]), saved(found[name], "resaved")
    assert len(before["optimizer"]) == len(before["model"])
    for part in ("model", "optimizer"):
        assert same(before[part], after[part]), part


def test_a_pipeline_resumes_bit_for_bit(resumed):
    """Only the first stage's tied weight is saved, so this would not hold if the last stage's differed from it."""
    found, _ = resumed
    one, parts = found["dropping"], found["dropping_resumed"]
    assert rows(one, *CURVE) == rows(parts, *CURVE)
    for part in ("model", "optimizer", "generators", "progress"):
        assert same(saved(one)[part], saved(parts)[part]), part


def test_the_weights_of_a_checkpoint_start_a_pipeline(resumed):
    found, alone = resumed
    assert rows(found["new"])[0]["train_loss"] < rows(alone)[0]["train_loss"]


# -- failure


def test_a_fault_on_one_stage_ends_every_process(dense, documents, folder):
    config = configuration(dense, documents, folder / "fault", pipeline_parallel=2, **BASE)
    program = str(ROOT / "tests" / "parallel" / "overflow.py")
    result, _ = work(folder / "faulty", {"job": {"argv": words(config), "program": program}}, 2)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (
        len(lines) == 1 and lines[0].startswith("error: stopped at step 3: loss 5.") and "gradient norm inf" in lines[0]
    )


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"micro_batch_size": 8}, "takes 2 micro-batches or more, and micro_batch_size=8 makes 1; expected --micro_ba"),
        ({"batch_size": 1, "micro_batch_size": 1}, "makes 1; expected --batch_size=2"),
        (
            {"batch_size": 6, "n_layer": 4, "pipeline_schedule": "interleaved"},
            "takes a multiple of 2 micro-batches, and micro_batch_size=2 makes 3; expected --micro_batch_size=1 or 3",
        ),
        ({"n_layer": 1}, "has 2 stages of a block or more, and n_layer=1; expected n_layer=2 at least"),
        ({"pipeline_schedule": "interleaved", "n_layer": 3}, "has 4 stages of a block or more, and n_layer=3"),
        ({"dtype": "float16"}, "float16 needs, which dtype=float16 is here; expected --dtype=bfloat16 or float32"),
        ({"compile": True, "compile_mode": "reduce-overhead"}, "replays CUDA graphs"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(keys, expected):
    config = tiny(**{"pipeline_parallel": 2, "batch_size": 8, "micro_batch_size": 2, **keys})
    with pytest.raises(BadInput, match=re.escape(expected)) as refused:
        pipeline.check_pipeline(config, Grid(pipeline=2), torch.device("cpu"))
    assert "\n" not in str(refused.value)
    pipeline.check_pipeline(config, Grid(data=2), torch.device("cpu"))


def test_auto_may_choose_among_micro_batches_that_fill_the_pipeline():
    config = tiny(pipeline_parallel=4, batch_size=12, micro_batch_size="auto")
    pipeline.check_pipeline(replace(config, n_layer=4), Grid(pipeline=4), torch.device("cpu"))
    assert [size for size in (1, 2, 3, 4) if pipeline.can_schedule("1f1b", 4, 12 // size)] == [1, 2, 3]
    assert [size for size in (1, 2, 3, 4) if pipeline.can_schedule("interleaved", 4, 12 // size)] == [1, 3]


# -- the cut


def test_the_bubble_is_that_of_the_papers():
    bubbles = {name: [parallel.predict_bubble(name, p, m) for p, m in ((2, 4), (4, 8))] for name in pipeline.STAGES}
    assert bubbles["1f1b"] == [1 / 5, 3 / 11]
    assert bubbles["interleaved"] == [1 / 9, 3 / 19]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_stages_are_as_even_as_they_can_be(costs, data):
    n = data.draw(st.integers(1, len(costs)))

    def sums(ranges):
        return sorted((sum(costs[i] for i in part) for part in ranges), reverse=True)

    cuts = itertools.combinations(range(1, len(costs)), n - 1)
    every = [[range(a, b) for a, b in itertools.pairwise([0, *cut, len(costs)])] for cut in cuts]
    ours = pipeline.balance(costs, n)
    assert list(ours) in every and sums(ours) == min(map(sums, every))


def test_the_head_counts_as_several_blocks():
    gpt2 = tiny(n_layer=12, n_embd=768, n_head=12, context_length=1024, vocab_size=50257, pad_vocab_to=64)
    assert [len(blocks) for blocks in parallel.cut_blocks(gpt2, 2)] == [8, 4]
    assert [len(blocks) for blocks in parallel.cut_blocks(replace(gpt2, vocab_size=256), 2)] == [6, 6]
    assert [len(blocks) for blocks in parallel.cut_blocks(gpt2, 4)] == [3, 4, 4, 1]
    interleaved = replace(gpt2, pipeline_schedule="interleaved")
    assert [len(blocks) for blocks in parallel.cut_blocks(interleaved, 2)] == [3, 4, 4, 1]
