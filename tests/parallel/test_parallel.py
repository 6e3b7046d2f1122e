"""Several processes, on gloo, train the same model as one process. Each runs tests/parallel/worker.py."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags, replace, rows, same, saved, tiny, weights, write_folder
from processes import ENVIRONMENT, TORCHRUN, configuration, torchrun, words, work
from torch.utils._pytree import tree_map

import train
from model import IGNORE
from nanoladder import checkpoint, parallel
from nanoladder.data import ValidationBatches, open_dataset
from nanoladder.errors import BadInput
from nanoladder.parallel.mesh import Grid

pytestmark = pytest.mark.slow

GPU_SIZES = {"n_embd": 128, "context_length": 64}  # heads of 64, which every attention kernel takes
TOLERANCE = 1e-4  # of losses, relative: sums in another order, in float32
CURVE = "step", "tokens", "train_loss", "val_loss", "val_bpb", "lr"

# What is trained by 1 and 2 processes, and some of it by 4. TINY is float32, batch 4, 6 steps.
CURVES = {
    "dense": {"eval_interval": 3, "eval_windows": 0},
    "documents": {"data": "documents", "eval_interval": 3, "batch_size": 8},
    "accumulation": {"data": "documents", "batch_size": 8, "micro_batch_size": 1, "set_to_none": False},
    "checkpointing": {"checkpointing": "every:1", "attention": "sdpa", "loss_chunks": 3, "pad_vocab_to": 64},
    "workers": {"num_workers": 1, "adamw_impl": "fused", "lazy_metrics": True},
    "optimizer": {"shard": "optimizer", "eval_interval": 3, "batch_size": 8, "micro_batch_size": 1},
    "full": {"shard": "full", "data": "documents", "eval_interval": 3, "adamw_impl": "fused"},
    "full, checkpointing": {"shard": "full", "checkpointing": "sqrt", "batch_size": 8, "micro_batch_size": 1},
    "full, memory": {"shard": "full", "checkpointing": "every:1", "loss_chunks": 3, "attention": "sdpa"},
    "full, selective": {"shard": "full", "checkpointing": "selective", "attention": "sdpa", "set_to_none": False},
    "full, float16": {"shard": "full", "dtype": "float16", "attention": "sdpa"},
    "float16": {"dtype": "float16", "micro_batch_size": 1},
}
COMPILED = {
    "compile": {"compile": True, "n_layer": 1, "loss_chunks": 2, "eval_interval": 6},
    "full, compile": {"compile": True, "n_layer": 1, "shard": "full", "checkpointing": "every:1", "eval_interval": 6},
}
FOUR = "dense", "documents", "optimizer", "full"
SHARDS = ["none", "optimizer", "full"]
CHANGES = {"alone": "full", "full": "optimizer", "optimizer": "none", "none": "full"}  # lab.equal tries the others


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def alone(dense, documents, folder):
    """What one process makes of every configuration: {name: config of the finished run}."""
    runs = {}
    for name, keys in (CURVES | COMPILED).items():
        runs[name] = configuration(dense, documents, folder / "alone" / name, **keys)
        train.train(replace(runs[name], compile=False))
    return runs


@pytest.fixture(scope="module", params=[2, 4])
def together(request, dense, documents, folder):
    """The same by several processes: (n, {name: config}, result, what each process saw)."""
    n = request.param
    curves = CURVES | COMPILED if n == 2 else {name: CURVES[name] for name in FOUR}
    runs = {name: configuration(dense, documents, folder / str(n) / name, **keys) for name, keys in curves.items()}
    result, seen = work(folder / str(n), {name: {"argv": words(config)} for name, config in runs.items()}, n)
    assert result.returncode == 0, result.stderr
    return n, runs, result, seen


def agree(ours, theirs, tolerance=TOLERANCE):
    """Whether two runs logged the same curve."""
    ours, theirs = rows(ours, *CURVE, "grad_norm"), rows(theirs, *CURVE, "grad_norm")
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        norms = one.pop("grad_norm"), other.pop("grad_norm")
        assert one == pytest.approx(other, rel=tolerance)
        assert norms[0] == pytest.approx(norms[1], rel=20 * tolerance)


def test_any_number_of_processes_follows_the_same_curve(alone, together):
    for name, run in together[1].items():
        half = "float16" in name
        agree(run, alone[name], 2e-3 if half else TOLERANCE)


def test_another_curve_does_not_agree(alone):
    """What the comparison must be able to tell apart."""
    with pytest.raises(AssertionError):
        agree(alone["dense"], alone["float16"])


def test_gradients_are_reduced_once_a_step(together):
    n, runs, _, seen = together
    for name, config in runs.items():
        groups = config.n_layer + 1 if config.shard != "none" else 1  # the model fits one bucket
        assert {process[name]["reductions"] for process in seen} == {6 * groups}, name
    assert len(seen) == n


def test_only_the_first_process_writes_and_prints_and_all_leave_cleanly(together):
    n, runs, result, _ = together
    for config in runs.values():
        names = {path.name for path in Path(config.out_dir).iterdir()}
        names -= {"best.safetensors", "step_00000003.safetensors"}
        expected = {".lock", "config.json", "metrics.jsonl", "last.safetensors", "step_00000006.safetensors"}
        assert names - {"tokenizer.json", "tokenizer.tiktoken"} == expected
        assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5, 6]
    assert result.stdout.count("parameters;") == len(runs)
    assert result.stdout.count(f"processes {n} by gloo") == len(runs)
    said = [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]  # by the compiler
    assert said == []


def test_cpu_threads_are_divided_among_the_processes(together):
    n, _, _, seen = together
    expected = max(1, len(os.sched_getaffinity(0)) // n)
    assert {process["dense"]["threads"] for process in seen} == {expected}


# -- checkpoints


@pytest.fixture(scope="module")
def resumed(dense, documents, folder):
    """Runs of two processes that stop after 3 of 6 steps, continued under every sharding: ({name: config}, seen)."""
    folder = folder / "resumed"
    base = configuration(dense, documents, folder / "alone", adamw_impl="fused", eval_interval=3, save_interval=3)
    first = replace(base, max_steps=3, lr_decay_steps=6)
    train.train(base)
    train.train(replace(first, out_dir=f"{folder}/alone_first"))
    runs, jobs = {"alone": base}, {}

    def add(name, config, **job):
        runs[name] = replace(config, out_dir=str(folder / name))
        jobs[name] = {"argv": words(runs[name]), **job}

    for source in SHARDS:
        add(f"{source}_first", replace(first, shard=source))
    for source, target in CHANGES.items():
        name = f"{source}_{target}"
        copy = [str(folder / f"{source}_first"), str(folder / name)]
        add(name, replace(base, shard=target, init_from="resume"), copy=copy)
    for shard in ("none", "full"):
        dropping = replace(base, dropout=0.2, shard=shard)
        add(f"dropping_{shard}", dropping)
        add(f"dropping_{shard}_parts", replace(dropping, max_steps=3, lr_decay_steps=6))
        copy = [str(folder / f"dropping_{shard}_parts"), str(folder / f"dropping_{shard}_resumed")]
        add(f"dropping_{shard}_resumed", replace(dropping, init_from="resume"), copy=copy)
    shutil.copytree(folder / "alone_first", folder / "damaged_first")
    (folder / "damaged_first" / "last.safetensors").write_bytes(b"")
    damaged = replace(base, shard="full", init_from="auto")
    add("damaged", damaged, copy=[str(folder / "damaged_first"), str(folder / "damaged")])
    add("new", replace(base, shard="full", init_from=f"{folder}/none_full/last.safetensors", max_steps=1))
    facts = {"argv": words(replace(first, out_dir=str(folder / "differing")))}
    jobs["config"] = facts | {"rank_1": {"argv": ["--learning_rate=0.5"]}}
    for number in (0, 1):
        write_folder(folder / str(number) / "node_data", [number] * 500, [0] * 100, 256)
    facts = {"argv": [*facts["argv"], "--dataset=node_data"], "cwd": str(folder / "0")}
    jobs["data"] = facts | {"rank_1": {"cwd": str(folder / "1")}}
    for number in (0, 1):
        copy = shutil.copytree(folder / "alone_first", folder / str(number) / "differing")
        state = checkpoint.load(copy / "last.safetensors")
        state["progress"]["step"] -= number
        checkpoint.write_file(copy / "last.safetensors", state)
    facts = {"argv": words(replace(base, out_dir="differing", init_from="resume")), "cwd": str(folder / "0")}
    jobs["checkpoint"] = facts | {"rank_1": {"cwd": str(folder / "1")}}
    result, seen = work(folder, jobs, 2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("damaged/last.safetensors is damaged") == 1
    return runs, seen


@pytest.mark.parametrize("source, target", CHANGES.items())
def test_a_checkpoint_of_one_sharding_continues_under_another(source, target, resumed):
    runs, _ = resumed
    agree(runs[f"{source}_{target}"], runs["alone"])


@pytest.mark.parametrize("source", SHARDS)
def test_a_checkpoint_of_several_processes_continues_in_one(source, resumed, tmp_path):
    runs, _ = resumed
    run = replace(runs["alone"], out_dir=str(tmp_path), init_from="resume")
    for name in ("last.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_bytes(Path(runs[f"{source}_first"].out_dir, name).read_bytes())
    train.train(run)
    agree(run, runs["alone"])


@pytest.mark.parametrize("source", SHARDS)
def test_a_checkpoint_is_whole_and_has_plain_names(source, resumed):
    runs, _ = resumed
    ours, theirs = saved(runs[f"{source}_first"]), saved(runs["alone"])
    assert ours.keys() == theirs.keys() and ours["optimizer"].keys() == theirs["optimizer"].keys()
    for part in ("model", "optimizer"):
        shapes = [tree_map(lambda leaf: getattr(leaf, "shape", leaf), state[part]) for state in (ours, theirs)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("shard", ["none", "full"])
def test_several_processes_resume_bit_for_bit_with_their_own_dropout(shard, resumed):
    runs, _ = resumed
    one, parts = runs[f"dropping_{shard}"], runs[f"dropping_{shard}_resumed"]
    assert rows(one, *CURVE) == rows(parts, *CURVE)
    for part in ("model", "optimizer", "generators", "progress"):
        assert same(saved(one)[part], saved(parts)[part]), part
    states = saved(one)["generators"]["cpu"]
    assert len(states) == 2 and not torch.equal(*states)


def test_four_processes_resume_bit_for_bit(dense, documents, folder):
    """A sum of four numbers, unlike one of two, depends on their order."""
    config = configuration(dense, documents, folder / "four_whole", batch_size=8, bias=True)
    first = replace(config, out_dir=str(folder / "four"), max_steps=3, lr_decay_steps=6)
    rest = replace(first, init_from="resume", max_steps=6)
    jobs = {name: {"argv": words(run)} for name, run in (("whole", config), ("first", first), ("rest", rest))}
    assert work(folder / "four_job", jobs, 4)[0].returncode == 0
    assert rows(rest, *CURVE, "grad_norm") == rows(config, *CURVE, "grad_norm")
    for part in ("model", "optimizer"):
        assert same(saved(rest)[part], saved(config)[part]), part


def test_several_processes_fall_back_from_a_damaged_checkpoint(resumed):
    runs, _ = resumed
    agree(runs["damaged"], runs["alone"])


def test_the_weights_of_a_checkpoint_start_a_sharded_run(resumed):
    runs, _ = resumed
    assert rows(runs["new"])[0]["train_loss"] < rows(runs["alone"])[0]["train_loss"] - 0.3


def test_what_differs_between_processes_is_named(resumed):
    _, seen = resumed
    for process in seen:
        assert "rank 1 has learning_rate=0.5, rank 0 learning_rate=0.01" in process["config"]["error"]
        assert "in their data: rank 1 has train.bin=500 tokens, digest" in process["data"]["error"]
        assert "checkpoint in differing: rank 1 has step=2, rank 0 step=3" in process["checkpoint"]["error"]


# -- failure


def error_lines(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_what_every_process_refuses_is_said_once(dense, tmp_path):
    result = torchrun("train.py", *flags(dataset=dense, out_dir=tmp_path / "run", ddp=True, batch_size=5))
    assert result.returncode != 0 and result.stdout == "" and not (tmp_path / "run").exists()
    assert error_lines(result) == [
        "error: batch_size=5 does not divide among 2 processes; expected batch_size 4 or 6, "
        "or another number of processes"
    ]
    assert result.stderr.count("Traceback") == 1  # torchrun's own; its summary repeats the line
    assert "traceback : nanoladder.errors.BadInput: batch_size=5 does not divide" in result.stderr


def test_a_process_that_fails_ends_the_job_with_its_own_error_first(dense, documents, folder):
    config = configuration(dense, documents, folder / "failed", max_steps=1000)
    result, _ = work(folder / "failing", {"job": {"argv": words(config), "die": [1, 3, "raise"]}}, 2, torchrun)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if re.match(r"(\[rank\d\]: )?\w*Error", line)]
    assert errors[0] == "[rank1]: RuntimeError: injected"
    root_cause = result.stderr[result.stderr.index("Root Cause") :]
    assert "injected" in root_cause and re.search(r"rank +: 1", root_cause)


@pytest.fixture(scope="module")
def undisturbed(dense, documents, folder):
    """A run of two processes that nothing interrupts, saved every second step."""
    config = configuration(dense, documents, folder / "undisturbed", dropout=0.2, save_interval=2)
    assert work(folder / "undisturbed_job", {"job": {"argv": words(config)}}, 2)[0].returncode == 0
    return config


def test_a_job_whose_process_was_killed_restarts_and_ends_as_if_nothing_had_been(undisturbed, folder):
    killed = replace(undisturbed, out_dir=f"{folder}/killed", init_from="auto")
    jobs = {"killed": {"argv": words(killed), "die": [1, 4, "SIGKILL"]}}
    result, _ = work(folder / "killing", jobs, 2, torchrun, options=["--max-restarts=1"])
    assert result.returncode == 0 and "failed (exitcode" in result.stderr
    assert rows(killed, *CURVE) == rows(undisturbed, *CURVE)
    assert same(weights(killed), weights(undisturbed))


@pytest.mark.nightly
def test_a_killed_process_that_has_a_part_of_the_model_restarts_exactly(dense, documents, folder):
    keys = {"tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch_size": 1, "dropout": 0.2, "save_interval": 2}
    undisturbed = configuration(dense, documents, folder / "parts", **keys)
    assert work(folder / "parts_job", {"job": {"argv": words(undisturbed)}}, 4)[0].returncode == 0
    killed = replace(undisturbed, out_dir=f"{folder}/parts_killed", init_from="auto")
    jobs = {"killed": {"argv": words(killed), "die": [3, 4, "SIGKILL"]}}
    result, _ = work(folder / "parts_killing", jobs, 4, torchrun, options=["--max-restarts=1"])
    assert result.returncode == 0 and "failed (exitcode" in result.stderr
    assert "mesh      4 processes = 2 pipeline × 2 tensor" in result.stdout
    assert rows(killed, *CURVE) == rows(undisturbed, *CURVE)
    for part in ("model", "optimizer", "generators"):
        assert same(saved(killed)[part], saved(undisturbed)[part]), part


def test_a_signal_to_one_process_ends_all_at_the_same_step_and_they_go_on_exactly(undisturbed, folder):
    signaled = replace(undisturbed, out_dir=f"{folder}/signaled", init_from="auto", save_interval=100)
    jobs = {"signaled": {"argv": words(signaled), "die": [1, 3, "SIGTERM"]}}
    result, _ = work(folder / "signaling", jobs, 2, torchrun, options=["--max-restarts=1"])
    assert result.returncode == 0 and result.stdout.count("SIGTERM: ended after step 4, saved in") == 1, result.stderr
    assert rows(signaled, *CURVE) == rows(undisturbed, *CURVE)
    assert same(weights(signaled), weights(undisturbed))


@contextlib.contextmanager
def node(endpoint, path):
    """A node of two: its torchrun, its standard error in the file at path. At the end it is killed if it still runs."""
    options = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
    options += [f"--rdzv-endpoint={endpoint}", "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2"]
    with open(path, "w") as errors:
        command = [*TORCHRUN, *options, "tests/parallel/worker.py", str(path.parent / "jobs.json")]
        environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/multi-node.md says why
        agent = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, stdout=subprocess.DEVNULL)
        try:
            yield agent
        finally:
            agent.kill()
            agent.wait()


def wait_until(condition, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_node_that_was_killed_comes_back_and_the_run_goes_on(undisturbed, folder):
    ours = replace(undisturbed, out_dir=f"{folder}/two_nodes", init_from="auto")
    files = folder / "nodes"
    files.mkdir()
    (files / "jobs.json").write_text(json.dumps({"job": {"argv": words(ours), "pause": [4, str(files / "paused")]}}))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with node(f"localhost:{port}", files / "first") as first:
        wait_until(lambda: listens(port))  # the first one keeps the store by which they meet
        with node(f"localhost:{port}", files / "second") as second:
            wait_until(lambda: len(list(files.glob("paused*"))) == 2)
            second.kill()  # the node as a whole: its torchrun and its process
            for pid in [int(path.read_text()) for path in files.glob("paused*")]:
                if int(Path(f"/proc/{pid}/stat").read_text().split()[3]) != first.pid:
                    os.kill(pid, signal.SIGKILL)
        (files / "paused_over").touch()
        with node(f"localhost:{port}", files / "third") as third:
            assert [first.wait(300), third.wait(300)] == [0, 0], (files / "first").read_text()
    assert rows(ours, *CURVE) == rows(undisturbed, *CURVE)
    assert same(weights(ours), weights(undisturbed))


# -- in this process


@pytest.mark.parametrize(
    "n, keys, expected",
    [
        (4, {"batch_size": 10}, "among 4 processes; expected batch_size 8 or 12"),
        (3, {"batch_size": 8, "micro_batch_size": 2}, "3 processes in micro-batches of 2; expected batch_size 6 or 12"),
        (8, {"batch_size": 4}, "among 8 processes; expected batch_size 8,"),
        (2, {"batch_size": 12, "micro_batch_size": 4}, "expected batch_size 8 or 16"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(n, keys, expected):
    with pytest.raises(BadInput, match=re.escape(expected)):
        parallel.check_batch(tiny(**keys), Grid(data=n))


@pytest.mark.parametrize("n, keys", [(4, {"batch_size": 8}), (8, {"batch_size": 16, "micro_batch_size": 4})])
def test_a_batch_that_divides_is_taken(n, keys):
    parallel.check_batch(tiny(**keys), Grid(data=n))


@pytest.mark.parametrize("kind", ["dense", "documents"])
def test_evaluation_is_split_into_as_many_batches_for_each(kind, request):
    config = tiny(dataset=str(request.getfixturevalue(kind)), batch_size=12, eval_windows=0)
    batches = ValidationBatches(open_dataset(config).val, config)
    ours = [list(batches.share(rank, 4)) for rank in range(4)]
    assert len({len(batches) for batches in ours}) == 1
    seen = [row for batches in ours for _, targets in batches for row in targets.tolist()]
    everything = [row for _, targets in batches for row in targets.tolist() if set(row) != {IGNORE}]
    assert sorted(row for row in seen if set(row) != {IGNORE}) == sorted(everything)


OPTIMIZERS = {"sgd": "full", "adafactor": "none", "muon": "full", "lion": "full", "adamw8bit": "full", "galore": "none"}


def test_every_optimizer_follows_the_same_curve_in_two_processes_and_resumes_in_them(dense, documents, folder):
    """n_embd=96: 8 bits are kept in whole, of a shard only of matrices of 8192 numbers and more."""
    runs, jobs, alone = {}, {}, {}
    for name, shard in OPTIMIZERS.items():
        alone[name] = configuration(dense, documents, folder / f"{name}_alone", optimizer=name, n_embd=96)
        alone[name] = replace(alone[name], pad_vocab_to=64, save_interval=3)
        train.train(alone[name])
        runs[name] = replace(alone[name], out_dir=str(folder / name), shard=shard)
        first = replace(runs[name], out_dir=str(folder / f"{name}_parts"), max_steps=3, lr_decay_steps=6)
        rest = replace(first, out_dir=str(folder / f"{name}_resumed"), init_from="resume", max_steps=6)
        jobs[name], jobs[f"{name}_parts"] = {"argv": words(runs[name])}, {"argv": words(first)}
        jobs[f"{name}_resumed"] = {"argv": words(rest), "copy": [first.out_dir, rest.out_dir]}
    whole = replace(alone["adamw8bit"], out_dir=str(folder / "8_first"), max_steps=3, lr_decay_steps=6)
    train.train(whole)
    other = replace(whole, out_dir=str(folder / "8_resumed"), init_from="resume", max_steps=6, shard="full")
    jobs["8_resumed"] = {"argv": words(other), "copy": [whole.out_dir, other.out_dir]}
    uneven = replace(alone["adamw8bit"], out_dir=str(folder / "uneven"), shard="full", context_length=15)
    jobs["uneven"] = {"argv": words(uneven)}
    inside = replace(alone["lion"], out_dir=str(folder / "inside"), optimizer_in_backward=True, grad_clip=0.0)
    jobs["inside"] = {"argv": words(inside)}
    result, seen = work(folder / "optimizers", jobs, 2)
    assert result.returncode == 0, result.stderr
    for name, config in runs.items():
        agree(config, alone[name], 1e-2 if name == "adamw8bit" else 1e-3)
        resumed = replace(config, out_dir=str(folder / f"{name}_resumed"))
        assert rows(config, *CURVE) == rows(resumed, *CURVE), name
        for part in ("model", "optimizer"):
            assert same(saved(config)[part], saved(resumed)[part]), name
    assert seen[0]["8_resumed"]["error"] is None
    agree(other, alone["adamw8bit"], 1e-2)
    assert "inside" in seen[0] and "expected --optimizer_in_backward=False" in seen[0]["inside"]["error"]
    assert "position_embedding.weight has 15" in seen[1]["uneven"]["error"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_gpus_follow_the_same_curve(dtype, shard, dense, documents, folder):
    keys = {"device": "cuda", "dtype": dtype, "attention": "sdpa", **GPU_SIZES}
    config = configuration(dense, documents, folder / f"gpu_{dtype}_{shard}_alone", **keys)
    train.train(config)
    ours = replace(config, out_dir=f"{folder}/gpus_{dtype}_{shard}", shard=shard)
    result, _ = work(folder / f"gpu_{dtype}_{shard}", {"job": {"argv": words(ours)}}, 2)
    assert result.returncode == 0 and "processes 2 by nccl" in result.stdout
    agree(ours, config, 5e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_replay_cuda_graphs_follow_the_same_curve(dense, documents, folder):
    keys = {"device": "cuda", "dtype": "bfloat16", "attention": "sdpa", "set_to_none": True, **GPU_SIZES}
    config = configuration(dense, documents, folder / "eager", **keys)
    train.train(config)
    ours = replace(config, out_dir=str(folder / "graphs"), compile=True, compile_mode="reduce-overhead")
    result, _ = work(folder / "graphs_work", {"job": {"argv": words(ours)}}, 2)
    assert result.returncode == 0, result.stderr
    agree(ours, config, 5e-3)
