"""Several processes, on gloo, share every sequence, and train the same model as one process that has it whole."""

import json
import shutil

import pytest
import torch
from conftest import replace, rows, same, saved, tiny, weights
from processes import configuration, script, words, work

import train
from nanoladder.config import check
from nanoladder.errors import BadInput
from nanoladder.parallel import context
from nanoladder.parallel.mesh import Grid, Mesh

CURVE = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr"

# What is trained by 2 processes, which exchange the 2 heads, and by 4, which gather keys. TINY is float32, batch 4.
CURVES = {
    "documents": {"batch_size": 8, "micro_batch_size": 2, "eval_interval": 3, "num_workers": 1},
    "odd": {"context_length": 24, "n_layer": 3, "checkpointing": "selective", "loss_chunks": 3, "pad_vocab_to": 64},
    "full": {"shard": "full", "checkpointing": "every:2", "micro_batch_size": 2, "eval_interval": 6},
    "compiled": {"compile": True, "n_layer": 1, "checkpointing": "every:1", "compile_scope": "block"},
    "compiled whole": {"compile": True, "n_layer": 1},
}
ONLY_HEADS = {
    "matmul": {"attention": "matmul", "data": "dense", "context_length": 30, "checkpointing": "sqrt"},
    "8 bits": {"optimizer": "adamw8bit", "n_embd": 96, "data": "dense"},
}
ONLY_KEYS = {"3 heads": {"n_head": 3, "n_embd": 48, "context_parallel": 2}}  # two groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def alone(dense, documents, folder):
    """What one process makes of every configuration: {name: config of the finished run}."""
    runs = {}
    for name, keys in (CURVES | ONLY_HEADS | ONLY_KEYS).items():
        keys = {"data": "documents", "attention": "sdpa", "context_parallel": 2, **keys}
        runs[name] = configuration(dense, documents, folder / "alone" / name, **keys)
        train.train(replace(runs[name], compile=False))
    return runs


def together(alone, folder, names, n, **jobs):
    """n processes train the named configurations: {name: config of the finished run}, and what each process saw."""
    runs = {name: replace(alone[name], out_dir=str(folder / f"{n}" / name)) for name in names}
    runs = {name: replace(run, context_parallel=2 if name in ONLY_KEYS else n) for name, run in runs.items()}
    jobs |= {name: {"argv": words(run)} for name, run in runs.items()}
    if n == 2:
        jobs["compiled whole"]["backend"] = "inductor"  # its code contains collectives
    result, seen = work(folder / f"jobs{n}", jobs, n)
    assert result.returncode == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]
    return runs, seen


def agree(ours, theirs, tolerance=1e-4):
    """Asserts that two runs logged the same curve and ended with the same weights."""
    for one, other in zip(rows(ours, *CURVE, "grad_norm"), rows(theirs, *CURVE, "grad_norm"), strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    ours, theirs = weights(ours), weights(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=10 * tolerance, msg=name)


@pytest.fixture(scope="module")
def first_half(alone, folder):
    """A run that one process ended after 3 of 6 steps."""
    run = replace(alone["matmul"], out_dir=str(folder / "first_half"), max_steps=3, lr_decay_steps=6)
    train.train(run)
    return run


@pytest.fixture(scope="module")
def two(alone, first_half, folder):
    """Also runs that two processes end after 3 steps, take from one process, and load but leave as they are."""
    parts = replace(first_half, out_dir=str(folder / "2_first_half"))
    rest = replace(alone["matmul"], out_dir=str(folder / "2_rest"), init_from="resume")
    loaded = replace(rest, out_dir=str(folder / "2_loaded"), learning_rate=0.0, min_lr=0.0, max_steps=4)
    jobs = {"parts": {"argv": words(parts)}}
    for run in (rest, loaded):
        jobs[run.out_dir] = {"argv": words(run), "copy": [first_half.out_dir, run.out_dir]}
    runs, seen = together(alone, folder, [*CURVES, *ONLY_HEADS], 2, **jobs)
    return {**runs, "parts": parts, "rest": rest, "loaded": loaded}, seen


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CURVES, *ONLY_HEADS])
def test_processes_that_exchange_heads_train_as_one(name, alone, two):
    agree(two[0][name], alone[name], 1e-2 if name == "8 bits" else 1e-4)


@pytest.mark.slow
def test_processes_that_gather_keys_train_as_one(alone, folder):
    runs, _ = together(alone, folder, [*CURVES, *ONLY_KEYS], 4)
    for name, run in runs.items():
        agree(run, alone[name])


@pytest.mark.slow
def test_gradients_are_averaged_once_a_step(two):
    for process in two[1]:
        assert process["documents"]["reductions"] == 6  # of 4 micro-batches each


@pytest.mark.slow
def test_a_checkpoint_of_processes_that_share_sequences_continues_in_one_and_back(alone, first_half, two, folder):
    runs, _ = two
    agree(runs["rest"], alone["matmul"])
    assert same(saved(runs["loaded"])["model"], saved(first_half)["model"])  # at a learning rate of 0
    for keys in ({}, {"learning_rate": 0.0, "min_lr": 0.0, "max_steps": 4}):
        back = replace(alone["matmul"], out_dir=str(folder / f"back{len(keys)}"), init_from="resume", **keys)
        shutil.copytree(runs["parts"].out_dir, back.out_dir)
        train.train(back)
        if keys:
            assert same(saved(back)["model"], saved(runs["parts"])["model"])
        else:
            agree(back, alone["matmul"])


# -- attention by itself


@pytest.fixture(scope="module")
def four(folder):
    """What each of 4 processes saw in attention.py."""
    result = script("tests/parallel/attention.py", folder, n=4, folder=folder / "attention")
    assert result.returncode == 0, result.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["heads", "keys"])
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(way, four):
    for process in four:
        assert max(process[way]["errors"]) < 1e-14  # of output, dq, dk, dv in float64


@pytest.mark.slow
def test_a_block_exchanges_as_often_and_as_much_as_the_stage_says(four):
    sent = {"heads": 4 * 2 * 16 * 32 // 4 * 3 // 4, "keys": 2 * 2 * 16 * 16 // 4 * 3}  # 2 sequences of 16, width 8·nh
    for process in four:
        heads, keys = process["heads"], process["keys"]
        assert heads["counts"] == {"all_to_all_single": 4}
        assert heads["forward"] == heads["backward"] == {"all_to_all_single": sent["heads"]}
        assert keys["counts"] == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert keys["forward"]["all_gather_into_tensor"] == keys["backward"]["reduce_scatter_tensor"] == sent["keys"]


@pytest.mark.slow
@pytest.mark.parametrize("way, expected", [("heads", 1 / 4), ("keys", (16 + 2 * 3) / (4 * 16))])
def test_activations_fall_with_the_number_of_processes(way, expected, four):
    """A block keeps 16 numbers for a token and channel; gathered keys and values are 2 from each other process."""
    for process in four:
        whole, part = process["activations"][way]
        assert part / whole == pytest.approx(expected, rel=0.15)  # outputs are kept before and after their exchange


# -- in this process


@pytest.mark.parametrize("n_head, n, T", [(4, 2, 12), (4, 4, 12), (3, 4, 24), (2, 4, 16), (1, 2, 4)])
def test_every_position_has_one_process_and_each_as_many_pairs_if_keys_are_gathered(n_head, n, T, monkeypatch):
    found = []
    for rank in range(n):
        monkeypatch.setattr(context, "mesh", lambda rank=rank: Mesh(Grid(context=n), rank))
        found.append(context.positions(tiny(n_head=n_head, n_embd=12, context_length=T, context_parallel=n)))
    assert sorted(torch.cat(found).tolist()) == list(range(T))
    pairs = [int((own + 1).sum()) for own in found]  # a query attends to its own position and all before
    assert (len(set(pairs)) == 1) == (n_head % n > 0)


def test_one_process_has_all_positions_and_its_attention_as_it_was():
    model = train.build_model(tiny(vocab_size=8, context_parallel=2), torch.device("cpu"))
    assert context.positions(model.config) is None
    assert "attend" not in vars(model.blocks[0].attention)
    assert not model.position_embedding._forward_pre_hooks


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"context_length": 15}, "context_length=15 does not divide into 2 pieces.*expected a multiple of 2"),
        ({"context_length": 18, "tensor_parallel": 2, "n_head": 4}, "into 4 pieces.*expected a multiple of 4"),
        ({"n_head": 1, "context_length": 18}, "into 4 pieces.* n_head=1; expected a multiple of 4"),
        ({"n_head": 1, "attention": "matmul"}, "attention=matmul takes as many .*n_head=1.*expected --attention=sdpa"),
    ],
)
def test_what_cannot_be_cut_is_refused(keys, expected):
    with pytest.raises(BadInput, match=expected):
        check(tiny(**{"attention": "sdpa", "context_parallel": 2, **keys}))
