"""Checkpoints whose digest holds and whose contents do not fit: refused in one line, or as good as the original."""

import collections
import math
import random
import shutil

import pytest
import torch
from conftest import RECIPE, refusal, replace, same, saved, tiny, with_torchao, words, write_state
from processes import python

import train
from nanoladder import checkpoint, files
from nanoladder.checkpoint.format import DTYPES, flatten, write_checkpoint
from nanoladder.config.keys import REMOVED

WIDE = {"n_embd": 64, "n_layer": 1}  # matrices of at least 4096 elements, as 8 bits need
RUNS = {  # of each kind of optimizer state
    "adamw": {},
    "muon": {**RECIPE, "max_steps": 2},
    "adafactor": {"optimizer": "adafactor", "bias": True},
    "galore": {"optimizer": "galore"},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "adamw8bit": {"optimizer": "adamw8bit"},
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, dense):
    """run_of(name): config of a finished run of two steps, with nothing but its last checkpoint. Read-only."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def get(name):
        if name not in made:
            keys = {"max_steps": 2, "dataset": str(dense), "out_dir": str(folder / name), **WIDE}
            made[name] = tiny(**keys | RUNS[name])
            train.train(made[name])
            (folder / name / "step_00000002.safetensors").unlink()
        return made[name]

    return get


# -- what a run needs


@pytest.mark.parametrize("name", with_torchao(RUNS))
def test_the_state_that_a_run_saves_is_the_state_that_is_expected(name, run_of):
    """Loading checks it against optim.state_shapes: none is missing, and none too many."""
    state = saved(run_of(name))
    assert state["optimizer"].keys() == state["model"].keys() and all(state["optimizer"].values())


def test_a_checkpoint_with_keys_of_removed_rungs_is_read_if_they_were_off(run_of, tmp_path):
    config = replace(run_of("sgd"), out_dir=str(shutil.copytree(run_of("sgd").out_dir, tmp_path / "run")))
    state, path = saved(config), tmp_path / "run" / "last.safetensors"
    keys = {**state["config"]}
    for changes in {}, {"norm": "rms"}:
        state["config"] |= REMOVED | changes
        write_state(path, state)
        if changes:
            said = "unknown key 'norm', expected none: it gained nothing, and was removed after commit"
            assert said in refusal(checkpoint.load, path)
        else:
            assert checkpoint.load(path)["config"] == keys


# -- what is refused


def changed(**parts):
    """A function that updates parts of a state, {part: {key: value}}; None removes a key."""

    def change(state):
        for part, changes in parts.items():
            state[part] |= changes
            state[part] = {key: value for key, value in state[part].items() if value is not None}

    return change


def of_optimizer(name, **changes):
    """A function that updates the optimizer's state of one weight."""
    return lambda state: state["optimizer"][name].update(changes)


FC = "blocks.0.mlp.fc.weight"  # (256, 64)
REFUSED = [  # a run, a change of its checkpoint, and a part of the line
    ("adamw", changed(model={FC: torch.zeros(64, 256)}), f"its {FC} is float32 (64, 256), where its config needs"),
    ("adamw", changed(model={FC: torch.zeros(256, 64).bfloat16()}), f"its {FC} is bfloat16 (256, 64)"),
    ("adamw", changed(model={"norm.weight": None}), "it has no tensor norm.weight"),
    ("adamw", changed(model={"norm.bias": torch.zeros(64)}), "it has norm.bias, which its config does not need"),
    ("adamw", changed(model={f"x{n}": torch.zeros(1) for n in range(500)}), " tensors for 1 blocks"),
    ("adamw", of_optimizer(FC, exp_avg=torch.zeros(255, 64)), f"its optimizer/{FC}/exp_avg is float32 (255, 64)"),
    ("adamw", of_optimizer(FC, exp_avg_sq=torch.zeros(256, 64).double()), "exp_avg_sq is float64"),
    ("adamw", of_optimizer(FC, step=torch.tensor(math.nan)), "step is nan; expected 1 to 2"),
    ("adamw", changed(optimizer={FC: {}}), f"it has no tensor optimizer/{FC}/step"),
    ("adamw", changed(generators={"cpu": torch.zeros(1, 5056).byte()}), "mt19937"),
    ("adamw", changed(generators={"cpu": torch.zeros(1, 16).byte()}), "found the input RNG state size to be 16"),
    ("adamw", changed(generators={"cpu": torch.zeros(5056)}), "its generators/cpu is float32 (5056,)"),
    ("adamw", changed(progress={"step": "2"}), "its progress has step='2'"),
    ("adamw", changed(progress={"step": 10**30}), "expected int, from 0 to 2"),
    ("adamw", changed(progress={"interval_loss": math.nan}), "its progress has interval_loss=nan"),
    ("adamw", changed(progress={"best_val_loss": None}), "it has no 'best_val_loss'"),
    ("adamw", changed(config={"n_layer": 10**9}), "it has 1 blocks, where its config says n_layer=1000000000"),
    ("adamw", changed(config={"n_embd": 10**9, "n_head": 1}), "Storage size calculation overflowed"),
    ("adamw", changed(config={"dataset": 5}), "its config: dataset=5: expected text"),
    ("adamw", changed(scaler={"scale": math.nan}), "its scaler has ['scale']"),
    ("adamw", lambda state: state.update(data=["train.bin"]), "its data is ['train.bin']"),
    (
        "adamw8bit",
        lambda s: s["optimizer"][FC]["exp_avg"].update(scale=torch.zeros(3)),
        "exp_avg/scale is float32 (3,)",
    ),
    (
        "adamw8bit",
        lambda s: s["optimizer"][FC]["exp_avg"].update(signed=False),
        "is not a tensor of (256, 64) in 8 bits",
    ),
    ("muon", of_optimizer(FC, momentum_buffer=torch.zeros(64, 256)), "momentum_buffer is float32 (64, 256)"),
    ("muon", changed(model={"smear": torch.zeros(2)}), "its smear is float32 (2,)"),
    ("adafactor", of_optimizer(FC, row_var=torch.zeros(1, 256)), "row_var is float32 (1, 256)"),
    (
        "galore",
        of_optimizer(FC, basis=torch.zeros(64, 8)),
        "basis is float32 (64, 8), where its config needs float32 (64, 16)",
    ),
    ("sgd", of_optimizer(FC, average=torch.zeros(1)), "average"),
]


@pytest.mark.parametrize("name, change, named", REFUSED)
def test_contents_that_do_not_fit_are_refused_before_anything_is_loaded(name, change, named, run_of, tmp_path, refused):
    config = replace(run_of(name), out_dir=str(tmp_path), init_from="resume", max_steps=3)
    state = saved(run_of(name))
    change(state)
    write_state(tmp_path / "last.safetensors", state)
    line = refused(train.main, *words(config))
    assert f"{tmp_path}/last.safetensors is damaged or not" in line and named in line


# -- anything at all, in processes of its own

SHAPED = [  # a tensor -> one of another shape
    *(lambda t: t.reshape(-1, 1), lambda t: t[None], lambda t: t.mT if t.dim() > 1 else t[..., None]),
    *(lambda t: t.reshape(-1)[:-1], lambda t: t.reshape(-1)[:0], lambda t: torch.cat([t.reshape(-1)] * 3)),
    *(lambda t: t.reshape(-1)[0], lambda t: t.new_zeros(2**16)),
]
VALUES = [None, True, -1, 10**30, 0.5, -0.5, math.nan, math.inf, "x", "2", [], [[]], {}, {"x": {}}]
CASES = 24


def forged(state, draw):
    """Returns a state's values and tensors, one of which is another, has another name, or is missing."""
    tensors, values = flatten(state)
    if draw.random() < 0.6:
        name = draw.choice(sorted(tensors))
        tensor, how = tensors.pop(name), draw.random()
        if how < 0.5:
            tensors[name] = draw.choice(SHAPED)(tensor).contiguous()
        elif how < 0.8:
            tensors[name] = tensor.to(draw.choice([dtype for dtype in DTYPES.values() if dtype != tensor.dtype]))
        elif how < 0.9:
            tensors[f"{name}{draw.choice(['x', '/x'])}"] = tensor
        return values, tensors
    node = values
    while isinstance(inner := node[key := draw.choice(sorted(node))], dict) and inner and draw.random() < 0.9:
        node = inner
    node[key] = draw.choice(VALUES)
    if draw.random() < 0.2:
        del node[key]
    return values, tensors


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_torchao(RUNS))
def test_a_forged_file_never_crashes_a_command(name, run_of, tmp_path):
    """It is refused in one line, or ends as the original does."""
    outcomes, draw, config = collections.Counter(), random.Random(name), run_of(name)
    commands = {
        "train": ["train.py", "--init_from=resume", "--max_steps=3"],
        "sample": ["sample.py", "--checkpoint=last", "--device=cpu", "--max_new_tokens=3"],
    }

    def run(command):
        return python(*commands[command], f"--out_dir={tmp_path}/run")

    def start(values, tensors):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(config.out_dir, tmp_path / "run")
        with files.writing(tmp_path / "run" / "last.safetensors") as file:
            write_checkpoint(file, values, tensors, sorted(tensors.items()))

    shutil.copytree(config.out_dir, tmp_path / "run")
    assert [run("sample").returncode, run("train").returncode] == [0, 0]
    expected = saved(replace(config, out_dir=f"{tmp_path}/run"))
    for _ in range(CASES):
        start(*forged(saved(config), draw))
        for command in ("sample", "train"):
            result = run(command)
            lines = result.stderr.splitlines()
            if result.returncode == 2:
                assert lines[-1].startswith("error: ") and "Traceback" not in result.stderr
            elif result.returncode == 0 and command == "train":
                found = saved(replace(config, out_dir=f"{tmp_path}/run"))
                assert all(same(found[part], expected[part]) for part in ("model", "optimizer", "generators"))
            outcomes[{0: "accepted", 2: "refused"}.get(result.returncode, "crashed")] += 1
    print(name, dict(outcomes))
    assert not outcomes["crashed"] and outcomes["refused"]
