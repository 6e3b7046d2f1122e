"""Checkpoints of divided models, in slices: of two processes, killed or with a full disk; damaged; read by all."""

import json
import os
import shutil
import threading
from pathlib import Path

import killed as kill
import pytest
from conftest import LOGGED, in_memory, replace, rows, same, saved, write_state
from processes import configuration
from test_crashes import failing
from test_damage import flipped

import convert
import evaluate
import sample
import train
from lab.measure.launch import run_together
from nanoladder import checkpoint, parallel
from nanoladder.checkpoint import slices
from nanoladder.run import metrics

pytestmark = pytest.mark.slow

PARTS = "model", "optimizer", "generators", "progress", "scaler"


def train_waiting(argv, before_step=lambda: None):
    """Trains; each step begins when the checkpoint of the step before is complete in this process."""
    metrics.plot, step, writer = (lambda *_: None), train.train_step, []

    class Writer(checkpoint.Writer):
        def __enter__(self):
            writer.append(self)
            return super().__enter__()

    def train_step(*arguments):
        writer[0].wait()
        before_step()
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", train_step)
        patch.setattr(checkpoint, "Writer", Writer)
        train.main(argv)


def saving():
    """True in the thread that saves."""
    return threading.current_thread() is not threading.main_thread()


def is_rank(number):
    return int(os.environ["RANK"]) == number


def list_calls(argv):
    """Trains. Returns the calls, (function, number), of killed.py's functions by the thread that saves."""
    with failing(counts=saving) as calls:
        train_waiting(argv)
    return calls


def train_killed(argv, rank, name, number):
    if is_rank(rank):
        kill.kill_before(name, number, saving)
    train_waiting(argv)


def words(config):
    return [f"--{key}={value}" for key, value in vars(config).items()]


def divided(dense, out_dir, **keys):
    """Config of a run that two processes divide, which saves each of 3 steps; the first evaluation is the best."""
    keys = {"shard": "full", "n_layer": 1, "max_steps": 3, "save_interval": 1, "eval_interval": 1, **keys}
    return configuration(dense, None, out_dir, dropout=0.2, lr_decay_steps=3, **keys)


def parts_of(state):
    return {part: state[part] for part in PARTS}


def assert_tidy(config):
    """Asserts that nothing but whole checkpoints is left in a run's folder."""
    folder = Path(config.out_dir)
    paths = checkpoint.list_checkpoints(folder)
    used = {json.loads(format_metadata(path)["slices"])["folder"] for path in paths}
    assert {path.name for path in folder.glob("*.slices*")} == used
    assert [path.name for path in folder.glob(".*")] == [".lock"]


def format_metadata(path):
    return checkpoint.format.read_tensors(path)[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dense):
    """(config of a finished run in slices, {step: its state}, the calls of each process). Read-only."""
    folder = tmp_path_factory.mktemp("whole")
    config = divided(dense, folder / "run")
    found = run_together(list_calls, words(config), n=2, folder=folder)
    calls = [[*map(tuple, calls)] for calls in found]
    states = {step: parts_of(saved(config, f"step_{step:08}")) for step in (2, 3)}
    assert_tidy(config)
    return config, states, calls


def calls_of_save(calls, number):
    """The calls of one process in the number-th save."""
    begins = [index for index, (name, _) in enumerate(calls) if name == "mkdir"] + [len(calls)]
    return calls[begins[number - 1] : begins[number]]


# -- kills


def test_a_process_killed_at_any_call_of_a_save_leaves_the_checkpoint_before_or_the_one_of_this_save(
    whole, dense, tmp_path
):
    """Of both processes. Resumed, the folder holds nothing else."""
    config, states, calls = whole
    found = []
    for rank in (0, 1):
        for name, number in calls_of_save(calls[rank], 3):
            if rank == 0 and name == "fsync":  # the same files as before the next call
                continue
            ours = replace(config, out_dir=str(tmp_path / f"{rank}{name}{number}"))
            with pytest.raises(RuntimeError):
                run_together(train_killed, words(ours), rank, name, number, n=2, folder=tmp_path)
            path, state = checkpoint.newest(ours.out_dir)
            found.append(step := state["progress"]["step"])
            assert path.name == "last.safetensors" and same(parts_of(in_memory(state)), states[step])
            train.train(replace(ours, max_steps=step, init_from="resume"))
            assert_tidy(ours)
            assert same(parts_of(saved(ours)), states[step])
    assert set(found) == {2, 3} and len(found) > 15


def test_a_run_of_two_processes_killed_in_a_save_resumes_bit_for_bit(whole, tmp_path):
    config, states, _ = whole
    ours = replace(config, out_dir=str(tmp_path / "run"), init_from="auto")
    with pytest.raises(RuntimeError):
        run_together(train_killed, words(ours), 1, "fsync", 3, n=2, folder=tmp_path)  # at the second save
    assert saved(ours)["progress"]["step"] == 1
    run_together(train.main, words(ours), n=2, folder=tmp_path)
    assert same(parts_of(saved(ours)), states[3]) and rows(ours, *LOGGED) == rows(config, *LOGGED)


# -- a full disk


def train_with_full_disks(runs):
    """Trains {name: (command line, rank, call)}; the call of that rank finds the disk full. Returns {name: exit}."""
    leave, parallel.destroy_process_group, ends = parallel.destroy_process_group, lambda: None, {}
    for name, (argv, rank, call) in runs.items():
        with failing(*[tuple(call)] * is_rank(rank), counts=saving):
            try:
                ends[name] = train_waiting(argv)
            except SystemExit as stop:
                ends[name] = str(stop)
        parallel.gather_objects(None)
    parallel.destroy_process_group = leave
    return ends


def test_a_disk_full_at_any_call_of_a_save_of_two_processes_loses_no_later_save(whole, tmp_path):
    config, states, calls = whole
    runs = {}
    for rank in (0, 1):
        for name, number in calls_of_save(calls[rank], 2):
            ours = replace(config, out_dir=str(tmp_path / f"{rank}{name}{number}"))
            runs[f"{rank}{name}{number}"] = words(ours), rank, (name, number)
    ends, _ = run_together(train_with_full_disks, runs, n=2, folder=tmp_path)
    warnings = (tmp_path / "stderr").read_text().splitlines()
    for name in runs:
        ours = replace(config, out_dir=str(tmp_path / name))
        assert ends[name] is None, name
        assert same(parts_of(saved(ours)), states[3])
        assert_tidy(ours)
    assert sum("of step 2 is not saved: [Errno 28] No space left on device" in line for line in warnings) > 15


def test_what_one_process_could_not_write_at_the_end_is_said_and_the_checkpoint_before_remains(whole, tmp_path):
    config, states, _ = whole
    ours = replace(config, out_dir=str(tmp_path / "run"))
    (end, other) = run_together(train_with_full_disks, {"run": (words(ours), 1, ("fsync", 5))}, n=2, folder=tmp_path)
    missing = "last.safetensors of step 3 and best.safetensors of step 3"
    assert end["run"] == f"error: {ours.out_dir} lacks {missing}, which could not be written"
    assert other["run"] is None and same(parts_of(saved(ours)), states[2])
    assert_tidy(ours)


def train_apart(argv, folder):
    """Trains in a folder of this process's own, in which there is an out_dir. Returns why it exits."""
    Path(folder, os.environ["RANK"], "run").mkdir(parents=True)
    os.chdir(Path(folder, os.environ["RANK"]))
    try:
        return train_waiting(argv)
    except SystemExit as stop:
        return str(stop)


def test_an_out_dir_that_the_processes_do_not_share_is_said(whole, tmp_path):
    ours = replace(whole[0], out_dir="run")
    end, _ = run_together(train_apart, words(ours), tmp_path / "apart", n=2, folder=tmp_path)
    assert "run lacks last.safetensors of step 3" in end
    lines = [line for line in (tmp_path / "stderr").read_text().splitlines() if "of step 1 is not saved" in line]
    assert len(lines) == 1 and "No such file or directory: 'run/step_00000001.slices/00001.safetensors'" in lines[0]


# -- damage


def damages():
    """{name: function that damages a file of slices, given its path and that of the same of another checkpoint}."""
    return {
        "flipped in the header": lambda path, _: path.write_bytes(flipped(path.read_bytes(), 400, 3)),
        "flipped in a tensor": lambda path, _: path.write_bytes(flipped(path.read_bytes(), -100, 0)),
        "cut off": lambda path, _: path.write_bytes(path.read_bytes()[:-1]),
        "empty": lambda path, _: path.write_bytes(b""),
        "missing": lambda path, _: path.unlink(),
        "another's": lambda path, other: shutil.copy(other, path),
    }


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", damages())
def test_damaged_slices_are_found_and_the_checkpoint_before_continues(how, number, whole, tmp_path, run_main):
    config = whole[0]
    ours = replace(
        config, out_dir=str(shutil.copytree(config.out_dir, tmp_path / "run")), init_from="resume", max_steps=2
    )
    path, other = (slices.file_of(tmp_path / "run" / f"step_0000000{step}.slices", number) for step in (3, 2))
    damages()[how](path, other)
    result = run_main(train.main, *words(ours))
    assert result.code == 0 and f"warning: {path} is damaged or not a file of a checkpoint's slices" in result.out
    assert "continuing from step_00000002.safetensors, step 2" in result.out
    assert result.err == ""


def test_each_process_verifies_some_slices_and_all_pass_over_what_one_finds_damaged(whole, tmp_path):
    config, states, _ = whole
    ours = replace(config, out_dir=str(shutil.copytree(config.out_dir, tmp_path / "run")), init_from="resume")
    path = slices.file_of(tmp_path / "run" / "step_00000003.slices", 1)
    path.write_bytes(flipped(path.read_bytes(), -100, 0))
    run_together(train.main, words(ours), n=2, folder=tmp_path)
    assert f"warning: {path} is damaged" in (tmp_path / "stdout").read_text()
    assert same(parts_of(saved(ours)), states[3])


# -- the scripts


@pytest.fixture
def single(whole, tmp_path):
    """The finished run with its last checkpoint in a single file."""
    config = replace(whole[0], out_dir=str(shutil.copytree(whole[0].out_dir, tmp_path / "single")))
    state = saved(config)
    for path in Path(config.out_dir).glob("*.s*s*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_state(Path(config.out_dir, "last.safetensors"), state)
    return config


def test_the_scripts_read_slices_as_a_single_file(whole, single, tmp_path, run_main):
    results = []
    for config in (whole[0], single):
        hf = tmp_path / f"hf{len(results)}"
        out = [
            run_main(sample.main, f"--out_dir={config.out_dir}", "--checkpoint=last", "--device=cpu", "--prompt=the"),
            run_main(evaluate.main, f"--out_dir={config.out_dir}", "--checkpoint=last", "--device=cpu"),
            run_main(convert.main, f"--out_dir={config.out_dir}", "--checkpoint=last", f"--output={hf}"),
        ]
        assert [result.code for result in out] == [0, 0, 0]
        texts = [result.out.replace(config.out_dir, "").replace(str(hf), "") for result in out]
        results.append((texts, (hf / "model.safetensors").read_bytes()))
    assert results[0][0][0] == results[1][0][0] and results[0][1] == results[1][1]


def test_a_new_run_starts_from_slices(whole, single, tmp_path):
    still = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 0.0, "min_lr": 0.0, "shard": "none"}
    path = f"{whole[0].out_dir}/last.safetensors"
    ours = replace(whole[0], out_dir=str(tmp_path / "new"), init_from=path, context_length=5, **still)
    train.train(ours)
    theirs, name = saved(single)["model"], "position_embedding.weight"
    theirs[name] = theirs[name][:5]
    assert same(saved(ours)["model"], theirs)


def test_a_checkpoint_that_its_run_replaces_while_it_is_read_is_the_new_one(whole, tmp_path, monkeypatch):
    folder, states = shutil.copytree(whole[0].out_dir, tmp_path / "run"), whole[1]
    read = slices.SliceFiles.read

    def replaced(found, number, name):
        if (folder / "step_00000003.slices").exists():
            shutil.rmtree(folder / "step_00000003.slices")
            (folder / "last.safetensors").unlink()
            os.link(folder / "step_00000002.safetensors", folder / "last.safetensors")
        return read(found, number, name)

    monkeypatch.setattr(slices.SliceFiles, "read", replaced)
    assert same(checkpoint.load_model(folder / "last.safetensors")["model"], states[2]["model"])


def test_a_damaged_optimizer_does_not_keep_a_model_from_being_read(whole, tmp_path, refused):
    """Only the weights are read; a damaged weight is refused."""
    folder, states = shutil.copytree(whole[0].out_dir, tmp_path / "run"), whole[1]
    path = slices.file_of(folder / "step_00000003.slices", 0)
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
    content = path.read_bytes()
    for part in ("optimizer/", ""):
        name = next(name for name in entries if name.startswith(f"{part}blocks.0.mlp.fc.weight"))
        path.write_bytes(flipped(content, start + entries[name]["data_offsets"][0], 0))
        if part:
            assert same(checkpoint.load_model(folder / "last.safetensors")["model"], states[3]["model"])
    line = refused(sample.main, f"--out_dir={folder}", "--checkpoint=last", "--device=cpu", "--prompt=the")
    assert f"{path} is damaged or not" in line and "does not match its SHA-256" in line
