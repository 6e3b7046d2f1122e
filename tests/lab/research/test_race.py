"""--mode=race trains three configs to their end, seed by seed, and says how much faster each ends with naive's loss.

Or one config and nanoGPT's own command, faked by a checkout with nanoGPT's interface.
"""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import build, flags, replace, tiny
from processes import forked

import train
from lab.measure import modes
from lab.measure.peers import nanogpt
from lab.measure.runs import RUNS, read
from lab.research import race
from nanoladder.checkpoint.interop import gpt2_name
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.run import load_config

SECONDS = {"naive": 120.0, "loop": 40.0, "both": 10.0}


class Player:
    """Fake of a Child: the recipe ends with a lower loss, except where `missed` says otherwise."""

    runs, missed, most = [], (), None

    def __init__(self, words, environment):
        if len(self.runs) == self.most:
            raise KeyboardInterrupt
        assert environment["TORCHINDUCTOR_CACHE_DIR"]
        config = load_config(words)
        self.start, self.looks = 0.0, 2
        self.name = "both" if config.optimizer == "muon" else "naive" if config.attention == "matmul" else "loop"
        self.bpb = 2.1 if self.name != "both" else 2.11 if config.seed in self.missed else 2.0
        self.runs.append(config)

    def metrics(self):
        return [{"step": 1, "train_loss": 6.0}, {"step": 2, "val_loss": 4.2, "val_bpb": 2.1}]

    def outcome(self):
        self.looks -= 1
        losses = {"val_loss": 2 * self.bpb, "val_bpb": self.bpb, "tokens": 384}
        return None if self.looks else {"seconds": SECONDS[self.name], "note": None, **losses}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def run(dense, tmp_path, run_main, monkeypatch):
    """run(**changes) runs --mode=race of a config with Muon against one without, in no time."""
    monkeypatch.setattr(race, "Child", Player)
    monkeypatch.setattr(race, "PAUSE", 0.0)
    for name, value in {"runs": [], "missed": (), "most": None}.items():
        monkeypatch.setattr(Player, name, value)

    def run(**changes):
        other = tiny(**{"dataset": str(dense), "attention": "sdpa", **changes})
        file = tmp_path / "other.py"
        file.write_text("\n".join(f"{key} = {value!r}" for key, value in vars(other).items()))
        options = "--mode=race", f"--against={file}", "--seeds=3", f"--out_dir={tmp_path}"
        return run_main(modes.main, *flags(dataset=dense), "--optimizer=muon", *options)

    return run


def ran(folder):
    """The runs of a race in a folder."""
    return [run for run in read(folder / RUNS, "race")[1] if "seed" in run.row]


@pytest.mark.slow
def test_each_seed_s_runs_are_compared_and_none_is_run_twice(run, tmp_path):
    Player.most = 4
    assert run().code == 130 and len(ran(tmp_path)) == 4
    Player.most = None
    done = run()
    assert done.code == 0 and "12.00× (12.00–12.00)" in done.out and "3.00× (3.00–3.00)" in done.out
    assert done.out.count("reached by every seed") == 3 and (tmp_path / "race.png").stat().st_size > 1e4
    assert [config.seed for config in Player.runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    curve = ran(tmp_path)[2].figures["curve"]
    assert [loss for _, loss in curve] == [3.0, 2.0] and curve[-1][0] == 10.0
    assert run().out == done.out and len(Player.runs) == 9


def test_the_picture_compares_validation_losses_and_has_training_losses_apart(tmp_path, drawn):
    runs = [
        {"name": name, "seed": seed, "seconds": seconds, "loss": 2.0, "bpb": 1.0, "curve": [[1.0, 0.5], [seconds, 1.0]]}
        for name, seconds in (("naive", 600.0), ("both", 60.0))
        for seed in (0, 1)
    ]
    race.draw({"runs": runs, "counted": {"bigrams": {"bpb": 1.1}, "unigrams": {"bpb": 9.0}}}, tmp_path / "race.png")
    ends, curves = drawn[0].axes
    compared = {line.get_label(): line for line in ends.lines if line.get_marker() == "o"}
    assert {label: [*line.get_xdata()] for label, line in compared.items()} == {
        "the naive loop: 10.0 minutes": [10.0, 10.0],
        "and the second ladder's recipe: 1.0 minutes": [1.0, 1.0],
    }
    assert all(set(line.get_ydata()) == {1.0} for line in compared.values())
    assert [[*line.get_ydata()] for line in curves.lines] == [[0.5]] * 4
    assert [text.get_text() for text in ends.texts] == ["bigrams"]


def test_a_loss_that_is_missed_is_said(run):
    Player.missed = (1,)
    assert "missed with seed 1" in run().out


def test_what_cannot_be_compared_is_refused_in_one_line(run, refused, dense, tmp_path):
    result = run(eval_windows=3)
    assert result.code == 2 and "eval_windows=3" in result.err and "expected the same validation" in result.err
    assert "--against=config/y.py" in refused(modes.main, *flags(dataset=dense), "--mode=race")
    for name in ("train.bin", "val.bin"):
        shutil.copy(dense / name, tmp_path)
    words, other = flags(dataset=tmp_path, vocab_size=40), tmp_path / "other.py"
    other.write_text(f"dataset = '{tmp_path}'")
    line = refused(modes.main, *words, "--mode=race", f"--against={other} --vocab_size=40 --context_length=16")
    assert "does not say how long its text is" in line


# -- against nanoGPT's own command

# It records its inputs, trains nothing, and saves the checkpoint that a test has written.
SCRIPT = """
import json
import os
import pickle
import shutil
import sys

import numpy as np
import torch

keys = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
with open(keys["dataset"] + "/meta.pkl", "rb") as file:
    seen = pickle.load(file)
seen |= {name: len(np.fromfile(f"{keys['dataset']}/{name}.bin", np.uint16)) for name in ("train", "val")}
torch.manual_seed(1337)
seen |= {"words": sys.argv[1:3], "draw": torch.rand(1).item(), "folder": os.getcwd()}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(seen) + "\\n")
if keys["learning_rate"] == "0":
    raise ValueError("no such rate")
for step, loss in enumerate((4.0, 3.0)):
    print(f"iter {step}: loss {loss:.4f}, time {1e3 * step:.2f}ms, mfu -100.00%")
shutil.copy(os.environ["SAVED"], keys["out_dir"] + "/ckpt.pt")
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("SAVED", str(tmp_path / "ckpt.pt"))
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(nanogpt, "subprocess", SimpleNamespace(run=forked))
    return tmp_path / "nanoGPT"


@pytest.fixture
def theirs(dense, tmp_path):
    """The config of a model that nanoGPT has saved, of a shape of its own, and its loss on the validation split."""
    config = tiny(dataset=str(dense), context_length=9, n_embd=8, pad_vocab_to=1, eval_windows=0)
    dataset = open_dataset(config)
    config = replace(config, vocab_size=dataset.vocab_size)
    model, *_ = build(config)
    weights = {f"transformer.{gpt2_name(name)}": weight for name, weight in model.named_parameters()}
    shape = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "bias", "vocab_size")}
    torch.save({"model": weights, "model_args": shape | {"block_size": 9}}, tmp_path / "ckpt.pt")
    return config, train.evaluate(model, dataset.val, config, torch.device("cpu"))


@pytest.mark.slow
def test_nanogpt_runs_on_the_same_data_and_is_evaluated_in_windows_of_its_own_context(
    checkout, theirs, dense, tmp_path
):
    words, config = ["config/x.py", "--learning_rate=0.1"], tiny(dataset=str(dense), eval_windows=0)
    runs = [nanogpt.run(checkout, words, config, seed) for seed in (0, 1)]
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    torch.manual_seed(1337)
    draw, dataset = torch.rand(1).item(), open_dataset(config)
    expected = {"words": words, "folder": str(checkout), "draw": draw, "vocab_size": dataset.vocab_size}
    expected |= {"train": len(dataset.train.tokens), "val": len(dataset.val.tokens)}
    assert seen[0] == expected and seen[1] == expected | {"draw": seen[1]["draw"]}
    assert seen[1]["draw"] != draw  # seed 0 is nanoGPT's own
    assert [path.name for path in checkout.iterdir()] == ["train.py"]
    bits = dataset.val.n_targets / dataset.meta["bytes"]["val"] / math.log(2)
    first, second, end = runs[0]["curve"]
    assert runs[0]["loss"] == pytest.approx(theirs[1]) and end == [runs[0]["seconds"], bits * runs[0]["loss"]]
    assert [first[1], second[1]] == [4 * bits, 3 * bits] and second[0] - first[0] == pytest.approx(1)


@pytest.mark.slow
def test_a_command_of_nanogpt_that_fails_is_said_in_its_words(checkout, dense):
    with pytest.raises(BadInput, match="with seed 0 failed: ValueError: no such rate"):
        nanogpt.run(checkout, ["config/x.py", "--learning_rate=0"], tiny(dataset=str(dense), eval_windows=0), 0)


def test_a_config_races_against_nanogpt(dense, checkout, tmp_path, run_main, refused, monkeypatch):
    monkeypatch.setattr(race, "Child", Player)
    monkeypatch.setattr(race, "PAUSE", 0.0)
    monkeypatch.setattr(Player, "runs", [])
    asked = []

    def run(folder, words, config, seed):
        asked.append((folder, words, config.eval_windows, seed))
        return {"seconds": 600.0, "loss": 4.1, "bpb": 2.05, "curve": [[1.0, 3.0], [600.0, 2.05]]}

    monkeypatch.setattr(nanogpt, "run", run)
    words = *flags(dataset=dense, eval_windows=0), "--optimizer=muon", "--mode=race", f"--nanogpt={checkout}"
    done = run_main(modes.main, *words, f"--out_dir={tmp_path}", "--seeds=3")
    assert done.code == 0 and "60.00× (60.00–60.00)" in done.out and "nats/token at the end" in done.out
    assert "4.1000, 4.1000, 4.1000" in done.out and "4.0000, 4.0000, 4.0000" in done.out
    assert "nanoGPT's loss" in done.out and "10.00, 10.00, 10.00" in done.out  # minutes
    assert asked == [(str(checkout), nanogpt.LAPTOP.split(), 0, seed) for seed in range(3)]
    assert (tmp_path / "race.png").stat().st_size > 1e4
    own = run_main(modes.main, *words, "--against=--max_iters=3", f"--out_dir={tmp_path / 'own'}", "--seeds=1")
    assert own.code == 0 and asked[-1][1] == ["--max_iters=3"]
    assert "expected --eval_windows=0" in refused(modes.main, *words, "--eval_windows=3")
    assert "expected a checkout of karpathy/nanoGPT" in refused(modes.main, *words, f"--nanogpt={tmp_path}")


# -- against other projects' recipes


@pytest.mark.parametrize("against", [False, True])
def test_other_recipes_race_at_several_rates(against, run, dense, tmp_path, run_main, refused, monkeypatch):
    asked = []

    def run_recipe(peer, checkout, factor, config, seed):
        asked.append((peer, checkout, factor, config.optimizer, seed))
        return {"seconds": 20.0 / factor, "tokens": 384, "loss": 4.1, "bpb": 2.05, "curve": [[1.0, 3.0], [20.0, 2.05]]}

    monkeypatch.setattr(race, "run_recipe", run_recipe)
    file, _ = race.recipes.CHECKOUTS["modded"]
    (tmp_path / "modded" / file).parent.mkdir(parents=True)
    (tmp_path / "modded" / file).touch()
    words = *flags(dataset=dense), "--optimizer=muon", "--mode=race", f"--modded={tmp_path / 'modded'}", "--seeds=2"
    other = tmp_path / "other.py"
    other.write_text("".join(f"{key} = {value!r}\n" for key, value in vars(tiny(dataset=str(dense))).items()))
    first = "naive" if against else "ours"
    done = run_main(
        modes.main, *words, "--rates=0.5,2", f"--out_dir={tmp_path / first}", *[f"--against={other}"] * against
    )
    factors = [factor for _, _, factor, _, _ in asked]
    assert done.code == 0 and factors == [0.5, 2.0] * 2 and asked[0][:2] == ("modded", str(tmp_path / "modded"))
    assert f"modded, rates × 2\n  command: `KellerJordan/modded-nanogpt by {words[0]}" in done.out
    assert f"{first}'s loss" in done.out and (tmp_path / first / "race.png").stat().st_size > 1e4
    said = refused(modes.main, *words[:-2], f"--modded={tmp_path}")
    assert "expected a checkout of KellerJordan/modded-nanogpt" in said
    assert "--rates: 0: expected a positive number" in refused(modes.main, *words, "--rates=0")
