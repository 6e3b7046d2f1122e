"""Programs shown by ladder.py train as train.py does, and each stage's diff contains its change and little else."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, rows, same, saved
from processes import python, script, work

import ladder
import model
import train
from lab.programs import diffs
from lab.programs.bundle import OPTIONS, standalone
from lab.programs.stages import BOTH, SAME, describe
from nanoladder.config import stage_names
from nanoladder.config.stages import RECIPE_DIR, fields, needs_several, reason, stage_below, stage_path
from nanoladder.run import load_config

STAGES = stage_names()
ALONE = [stage for stage in STAGES if not needs_several(stage)]
FIELDS = [*fields("naive"), *OPTIONS]
TINY = {
    "device": "cpu",
    "deterministic": True,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "context_length": 16,
    "batch_size": 8,
    "max_steps": 4,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "log_interval": 1,
    "eval_windows": 8,
}
# For each stage: code among its changes, and what the definitions that it newly calls contain.
CHANGES = {
    "set_to_none": ("zero_grad(set_to_none=True)", ""),
    "lazy_metrics": ("loss.item()", ""),
    "loader": ("DataLoader(", "def prefetch("),
    "allocator": ("keep_freed_memory(", "mallopt(M_MMAP_MAX, 0)"),
    "tf32": ('set_float32_matmul_precision("high")', ""),
    "amp": ("scaler.scale(loss).backward()", "multiplies_bfloat16()"),
    "flash": ("F.scaled_dot_product_attention(", ""),
    "blocks": ("attend_in_blocks(q, k, v)", "torch.bmm(weights, v_[:, :end])"),
    "fused_adamw": ("fused=True", ""),
    "pad_vocab": ("self.pad_vocabulary(-config.vocab_size % 64)", ""),
    "compile": ("model.compile(", ""),
    "chunked_loss": ("head_loss(", "torch.mm(logits, weight, out=d_hidden[chunk])"),
    "cuda_graph": ("machine.replay(forward_backward, model, scaler, batch, config)", "torch.cuda.CUDAGraph()"),
    "half_residual": ("x = x.to(torch.get_autocast_dtype(x.device.type))", ""),
    "checkpointing": ("recompute(block, x, use_reentrant=False)", ""),
    "grad_accumulation": ("batch.split(config.batch_size // 4)", ""),
    "low_memory_optimizer": ("optimizer = optim.build(groups, model, config)", "from torchao.optim import AdamW8bit"),
    "float8": ("machine.use_float8(model.blocks)", "return scaled_mm(a, b.t(), a_scale, b_scale"),
    "ddp": ("parallel.DistributedDataParallel(model", "dist.init_process_group("),
    "shard": ("parallel.fully_shard(", "fsdp.fully_shard(block"),
    "tensor_parallel": ("parallel.apply_tensor_parallel(", '"attention.qkv": ColwiseParallel()'),
    "context_parallel": ("parallel.apply_context_parallel(", "def attend_by_heads("),
    "pipeline_parallel": ("model.forward_backward(batch, n_tokens)", "pipelining.Schedule1F1B"),
}
SCREEN = 40  # lines of a diff that fits on one


def write(stage, folder):
    """Writes the program of a stage into a folder. Returns its path."""
    path = folder / f"{stage}.py"
    path.write_text(diffs.script(stage), encoding="utf-8")
    return path


def load(path):
    """Imports a file, as a module that nothing else knows."""
    spec = importlib.util.spec_from_file_location(f"shown_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(stage, program, dense, folder, **keys):
    """The command line of a program at a stage."""
    own = {**TINY, "dataset": dense, "stage": stage, "eval_interval": 2, "out_dir": folder / stage / program}
    return [f"--{key}={value}" for key, value in {**own, **keys}.items()]


def figures(words):
    return rows(load_config(words), "train_loss", "val_loss", "grad_norm")


@pytest.fixture(scope="module")
def naive(dense, tmp_path_factory):
    """naive(**keys): the figures of the naive loop."""

    @functools.cache
    def run(**keys):
        words = command("naive", "naive", dense, tmp_path_factory.mktemp("naive"), **keys)
        train.main(words)
        return figures(words)

    return run


def compare(ours, shown, naive):
    """Asserts that train.py and the program shown trained identically, and like naive except for rounding."""
    assert figures(shown) == figures(ours) and len(figures(ours)) == TINY["max_steps"]
    assert same(*(saved(load_config(words))["model"] for words in (ours, shown)))
    for row, expected in zip(figures(ours), naive, strict=True):
        assert row == pytest.approx(expected, rel=0.04)  # of the gradient's norm; the loss is closer


def printed(result):
    """Returns the training and the validation losses that a standalone program has printed."""
    assert result.returncode == 0, result.stderr
    found = re.findall(r"^step \d+: (validation )?loss (\S+)$", result.stdout, re.MULTILINE)
    return [[float(loss) for kind, loss in found if bool(kind) == evaluated] for evaluated in (False, True)]


def logged(words):
    """Returns the training and the validation losses of a run of train.py."""
    found = rows(load_config(words))
    return [[row[key] for row in found if key in row] for key in ("train_loss", "val_loss")]


TRACED = "import torch\ntorch.compiler.set_stance(force_backend='aot_eager').__enter__()\n"  # as the others compile


def take_along(stage, folder, dense, **keys):
    """Writes the standalone program of a stage, which prints all digits, into a folder.

    Returns its path, and its command line.
    """
    path = folder / f"{stage}_alone.py"
    path.write_text(TRACED + standalone(stage).replace("loss:.4f}", "loss:.17g}"), encoding="utf-8")
    own = {"eval_interval": 2, "output": folder / f"{stage}.pt"} | TINY | keys
    return path, [dense, *(f"--{key}={value}" for key, value in own.items() if key not in ("device", "deterministic"))]


SMALLER = {"n_layer": 1, "eval_interval": 0}  # one block and no evaluation, so that less is traced


@pytest.mark.slow
@pytest.mark.parametrize("stage", ALONE)
def test_all_programs_of_a_stage_train_identically_and_like_naive(stage, dense, naive, tmp_path):
    """train.py, the program shown, and the one that runs alone: bit for bit."""
    commands, keys = [], SMALLER if "compile" in stage_path(stage) else {}
    for program in (train, load(write(stage, tmp_path))):
        torch._dynamo.reset()
        commands.append(command(stage, program.__name__, dense, tmp_path, **keys))
        with torch.compiler.set_stance(force_backend="aot_eager"):
            program.main(commands[-1])
    compare(*commands, naive(**keys))
    path, words = take_along(stage, tmp_path, dense, **keys)
    result = python(path, *words, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    assert printed(result) == logged(commands[0])
    assert "a sample, from the first tokens of val.bin:\n\nthe cat " in result.stdout
    weights = torch.load(tmp_path / f"{stage}.pt")
    for name, weight in saved(load_config(commands[0]))["model"].items():
        assert torch.equal(weights[name][: len(weight)], weight), name  # without the vocabulary's padding


def test_the_diff_of_muon_shows_its_code():
    shown = "\n".join(source for _, source in diffs.definitions(stage_below("muon"), "muon"))
    assert all(
        part in shown for part in ("def step(self):", "average.lerp_(gradient", "torch.baddbmm(gram, gram, gram")
    )


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["muon", "smear"])
def test_the_program_of_a_rung_runs_alone(dense, tmp_path, rung):
    """Of the first rung, and of the last that holds."""
    words = [*command("naive", "train", dense, tmp_path), f"--recipe={rung}"]
    train.main(words)
    path, own = take_along(rung, tmp_path, dense)
    result = python(path, *own, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    assert printed(result) == logged(words)


@pytest.mark.slow
def test_in_two_processes_all_programs_train_identically_and_like_naive(dense, naive, tmp_path):
    """Every stage that one process ignores."""
    jobs, keys = {}, {stage: {} if stage == "pipeline_parallel" else SMALLER for stage in filter(needs_several, STAGES)}
    for stage in keys:
        for program in ("train.py", str(write(stage, tmp_path))):
            words = command(stage, Path(program).stem, dense, tmp_path, **keys[stage])
            jobs[f"{stage}, {program}"] = {"program": program, "argv": words}
    result, seen = work(tmp_path / "work", jobs, 2)
    assert result.returncode == 0 and len(seen) == 2, result.stderr
    assert not any(process[name]["error"] for process in seen for name in jobs)
    commands = [job["argv"] for job in jobs.values()]
    for stage, ours, shown in zip(keys, commands[::2], commands[1::2], strict=True):
        compare(ours, shown, naive(**keys[stage]))
        path, words = take_along(stage, tmp_path, dense, **keys[stage])
        result = script(path, *words, n=2, folder=tmp_path / stage)
        assert printed(result) == logged(ours)
        assert (tmp_path / f"{stage}.pt").exists() == ("a sample" in result.stdout) == (stage == "ddp")


@pytest.mark.slow
def test_a_standalone_program_imports_nothing_of_ours_and_is_no_longer_than_necessary(tmp_path):
    for stage in STAGES:
        program = standalone(stage)
        nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
        with_8_bits = {"torchao"} if stage == "low_memory_optimizer" else set()
        packages = {name.partition(".")[0] for name in names}
        assert packages - set(sys.stdlib_module_names) == {"numpy", "torch"} | with_8_bits, stage
        assert "BadInput(" not in program and "nanoladder." not in program, stage
        (tmp_path / f"{stage}.py").write_text(program, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", tmp_path]  # no undefined or unused names
    assert subprocess.run(ruff, text=True, capture_output=True).stdout == "All checks passed!\n"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The standalone program of naive, as a module."""
    path = tmp_path_factory.mktemp("alone") / "alone.py"
    path.write_text(standalone("naive"), encoding="utf-8")
    return load(path)


def test_a_standalone_program_refuses_wrong_input_in_one_line(alone, refused, dense):
    for words, message in [
        ([], "the following arguments are required: folder"),
        (["missing"], "no train.bin in 'missing'; expected a folder as data/*/prepare.py or nanoGPT writes it"),
        ([__file__], f"no train.bin in '{__file__}'; expected a folder"),
        ([dense, "--n_layers=3"], "unrecognized arguments: --n_layers=3"),
        ([dense, "--n_layer=x"], "argument --n_layer: invalid int value: 'x'"),
        ([dense, "--n_layer=0"], "n_layer=0: expected at least 1"),
        ([dense, "--vocab_size=9"], "vocab_size=9: expected at least the folder's, 17"),
        ([dense, "--n_head=3"], "n_embd=256 does not divide among n_head=3 heads"),
        ([dense, "--context_length=9999"], "context_length=9999: val.bin has 352 tokens"),
    ]:
        assert refused(alone.main, *words).startswith(f"error: {message}")


def test_a_standalone_program_takes_a_folder_of_nanogpt_s(alone, run_main, tmp_path):
    """Without meta.json it is of GPT-2's tokens, and without a tokenizer the sample is of ids."""
    for name in ("train.bin", "val.bin"):
        np.full(100, 50_256, dtype=np.uint16).tofile(tmp_path / name)
    sizes = ["--n_layer=1", "--n_head=1", "--n_embd=4", "--context_length=4", "--batch_size=2", "--max_steps=1"]
    result = run_main(alone.main, tmp_path, *sizes, f"--output={tmp_path}/model.pt")
    assert result.code == 0 and "step 1: validation loss 10.8" in result.out
    assert result.out.splitlines()[-1].startswith("[50256, 50256, ")
    assert len(torch.load(tmp_path / "model.pt")["head.weight"]) == 50_257


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, "uint16"), (65_537, "uint32")])
def test_a_standalone_program_reads_ids_in_the_dtype_of_its_vocabulary(vocab_size, dtype, alone, tmp_path):
    program, ids = alone, np.arange(vocab_size - 100, vocab_size)
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    config = program.Config(vocab_size=vocab_size, context_length=16, batch_size=8)
    inputs, targets = program.TrainingBatches(tmp_path / "train.bin", config)[1]
    assert inputs.min() >= ids[0] and torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("rung", stage_names(RECIPE_DIR))
def test_the_program_of_a_rung_has_the_loss_and_the_gradients_of_model_py(rung, tmp_path):
    words = [f"--{key}={TINY[key]}" for key in ("n_layer", "n_head", "n_embd", "context_length")]
    config = load_config([*words, "--vocab_size=60", "--stage=naive", f"--recipe={rung}"])
    tokens = torch.randint(60, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    models = [module.GPT(config) for module in (model, load(write(rung, tmp_path)))]
    losses = []
    for each in models:
        torch.manual_seed(0)  # sampled_softmax draws
        losses.append(each(*tokens))
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert same(*({name: p.grad for name, p in each.named_parameters()} for each in models))


@pytest.mark.slow
def test_shown_programs_are_as_tidy_as_the_project(tmp_path):
    for stage in BOTH:
        write(stage, tmp_path)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", tmp_path]
        result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_shown_program_has_no_trace_of_other_stages():
    for stage in STAGES:
        assert re.findall(rf"config\.({'|'.join(FIELDS)})\b", diffs.script(stage)) == [], stage
    naive = diffs.script("naive")
    later = "autocast|scaler|compile|recompute|DataLoader|micro_batches|aten|8bit|scale_lr|in_backward|parallel|rank"
    assert not re.search(later, naive)
    assert "    loss.backward()\n" in naive and "        optimizer.step()\n" in naive


@pytest.mark.slow
def test_a_stage_changes_few_lines_and_shows_what_stands_behind_them():
    for stage in STAGES[1:]:
        call, behind = CHANGES.get(stage, ("", ""))
        lines = [line for line in diffs.diff(stage_below(stage), stage) if line[0] in "+-" and line[1:].strip()]
        assert any(call in line for line in lines) and len(lines) <= SCREEN, stage
        shown = "\n".join(source for _, source in diffs.definitions(stage_below(stage), stage))
        assert behind in shown and "raise BadInput" not in shown, stage
        assert bool(shown) == bool(behind) or stage not in CHANGES, stage


@pytest.mark.slow
def test_every_rung_shows_what_it_changes():
    for rung in stage_names(RECIPE_DIR)[1:]:
        assert describe(rung).diff, rung


def test_a_diff_patches_the_previous_program_into_the_next(tmp_path):
    """git apply reads what ladder.py diff prints."""
    patch = "--- a/naive.py\n+++ b/naive.py\n" + "\n".join(diffs.diff("naive", STAGES[-1])) + "\n"
    naive = write("naive", tmp_path)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert naive.read_text(encoding="utf-8") == diffs.script(STAGES[-1])


def test_show_and_diff_print_what_they_are_asked_for(run_main):
    assert run_main(ladder.main, "show", "amp").out == diffs.script("amp")
    printed = run_main(ladder.main, "diff", "tf32").out
    assert printed == run_main(ladder.main, "diff", "allocator", "tf32").out
    assert printed.splitlines()[0].endswith("@@ set_up")
    assert '-    torch.set_float32_matmul_precision("highest")\n+    torch.set_float32' in printed
    assert run_main(ladder.main, "diff", "tf32", "tf32").out == ""
    printed = run_main(ladder.main, "diff", "scalar_lr").out
    assert (
        printed.startswith(f"scalar_lr: 1.0 → 4.0. {SAME}\n\n@@ ")
        and "+            rates[parameter] = 4.0\n" in printed
    )
    program = run_main(ladder.main, "diff", "amp", "--program").out
    assert run_main(ladder.main, "diff", "amp").out.startswith(f"{program}\n# nanoladder/machine/precision.py\n\ndef ")


@pytest.mark.parametrize(
    "words, answer",
    [
        (["show", "fused_adam"], "did you mean 'fused_adamw'?"),
        (["diff", "amp", "flsh"], "did you mean 'flash'?"),
        (["diff", "naive"], "ladder.py show naive"),
        (["diff", "amp", "flash", "tf32"], "unrecognized arguments: tf32"),
        (["show"], "required: NAME"),
        (["show", "amp", "--standalon"], "did you mean '--standalone'?"),
        (["sho", "amp"], "did you mean 'show'?"),
        (["amp"], "invalid choice: 'amp' (choose from"),
    ],
)
def test_an_unknown_command_or_stage_is_refused(refused, words, answer):
    assert answer in refused(ladder.main, *words)


@pytest.mark.parametrize("command", ["list", "show", "diff", "records", "check", "docs", "html"])
def test_every_command_says_what_it_does(run_main, command):
    done = run_main(ladder.main, command, "--help")
    assert done.code == 0 and done.out.startswith(f"usage: python ladder.py {command} ")
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.split("\n\n")[1].endswith(".") and f"\n    {command}  " in run_main(ladder.main, "--help").out


def test_the_list_has_both_ladders_within_the_columns_of_the_terminal(run_main, monkeypatch):
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = run_main(ladder.main).out
        assert out == run_main(ladder.main, "list").out and max(map(len, out.splitlines())) <= columns
        said = " ".join(re.sub("[├└│]", "", out).split())
        assert all(f" {stage} {reason(stage)}" in said and len(reason(stage)) <= 70 for stage in BOTH)
    assert len(out.splitlines()) == len(BOTH) + 3
