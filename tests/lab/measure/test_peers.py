"""--mode=peers gives every peer the same weights and batches, one clock, and a row, even if it fails."""

import dataclasses
import itertools
import math
import os
import sys

import numpy as np
import pytest
import torch
from conftest import MACHINE, FakeTurns, build, flags, replace, tiny
from processes import python

import train
from lab.measure import measurements, modes, turns
from lab.measure.launch import Processes
from lab.measure.peers import nanochat, nanogpt, recipes, task
from lab.measure.peers.task import Task
from lab.measure.turns import LEAST_TURNS, TURN
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from nanoladder.run.metrics import read_metrics

# A checkout whose script has nanoGPT's interface: flags, files, random draws, printed lines. It records its inputs.
SCRIPT = """
import pickle
import sys
from ast import literal_eval

import numpy as np
import torch

from model import Model

keys = dict(word[2:].split("=", 1) for word in sys.argv[1:])
T, B = int(keys["block_size"]), int(keys["batch_size"])
with open(keys["dataset"] + "/meta.pkl", "rb") as file:
    model = Model(pickle.load(file)["vocab_size"], int(keys["n_embd"]))
ids = np.memmap(keys["dataset"] + "/train.bin", dtype=np.uint16, mode="r")
for step in range(int(keys["max_iters"])):
    places = torch.randint(len(ids) - T, (B,))
    inputs = torch.stack([torch.from_numpy(ids[i : i + T].astype(np.int64)) for i in places])
    targets = torch.stack([torch.from_numpy(ids[i + 1 : i + 1 + T].astype(np.int64)) for i in places])
    if step < 5:
        torch.save([inputs, targets, dict(model.state_dict()), keys], f"{keys['out_dir']}/{step}.pt")
    if step == 0:
        print("step 0: train loss nan, val loss nan")
    print(f"iter {step}: loss {max(0, 5 - step / 10):.4f}, time 1.00ms, mfu -100.00%")
"""
MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab_size, n_embd)})
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
"""

# A checkout whose modules have nanochat's interface. It records what its model is built from and trained on.
NANOCHAT = """
import os
from dataclasses import dataclass

import torch
from torch import nn

DTYPE, seen = os.environ["NANOCHAT_DTYPE"], []

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.logits = nn.Parameter(torch.empty(config.vocab_size))

    def init_weights(self):
        nn.init.zeros_(self.logits)

    def setup_optimizer(self, weight_decay=0.0, **rates):
        assert rates == {"matrix_lr": 0.5, "embedding_lr": 0.3, "unembedding_lr": 1e-3, "scalar_lr": 2}
        group = {"params": [*self.parameters()], "lr": 0.5, "initial_lr": 0.5, "kind": "muon", "decay": weight_decay}
        return torch.optim.SGD([group])

    def forward(self, tokens, targets, loss_reduction="mean"):
        seen.append((self.config, tokens, targets))
        logits = self.logits.expand(targets.numel(), -1)
        return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=loss_reduction)
"""
# Its script, which trains when it runs.
BASE_TRAIN = """
import argparse
import math
from nanochat.gpt import GPT
parser = argparse.ArgumentParser()
parser.add_argument("--run", type=str, default="dummy")
parser.add_argument("--matrix-lr", type=float, default=0.5)
parser.add_argument("--embedding-lr", type=float, default=0.3, help="of embeddings")
parser.add_argument("--unembedding-lr", type=float, default=1e-3)
parser.add_argument("--scalar-lr", type=float, default=2)
parser.add_argument("--weight-decay", type=float, default=0.25)
parser.add_argument("--eval-tokens", type=int, default=80 * 2)
parser.add_argument("--fp8", action="store_true")
args = parser.parse_args()
num_iterations = 10**6
weight_decay_scaled = args.weight_decay * math.sqrt(2)

def get_lr_multiplier(it):
    return 1 - it / num_iterations

def get_muon_momentum(it):
    return 0.5

def get_weight_decay(it):
    return weight_decay_scaled * math.sqrt(1 - it / num_iterations)

raise SystemExit("trains")
"""
# A script with autoresearch's interface, and one with that of modded-nanogpt's third track
AUTORESEARCH = """
import os
os.environ["NO_SUCH"] = "1"
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F
from kernels import get_kernel
fa3 = get_kernel("flash").interface

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert (config.n_layer, config.n_head, config.n_kv_head, config.window_pattern) == (2, 2, 2, "L")
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def init_weights(self):
        self.embedding.to(dtype=torch.bfloat16)
        nn.init.zeros_(self.head.weight)

    def setup_optimizer(self, adam_betas, weight_decay, **rates):
        assert adam_betas == (0.8, 0.95) and weight_decay == 0.2
        assert rates == {"embedding_lr": 3.0, "unembedding_lr": 4.0, "matrix_lr": 5.0, "scalar_lr": 6.0}
        group = {"params": [*self.parameters()], "lr": 1.0, "initial_lr": 1.0, "kind": "muon"}
        return torch.optim.SGD([group])

    def forward(self, tokens, targets, reduction="mean"):
        x = self.embedding(tokens).unsqueeze(2)
        assert x.dtype == torch.bfloat16
        x = fa3.flash_attn_func(x, x, x, causal=True, window_size=(16, 0)).squeeze(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)

EMBEDDING_LR = 3.0  # of Adam
UNEMBEDDING_LR = 4.0
MATRIX_LR = 5.0
SCALAR_LR = 6.0
WEIGHT_DECAY = 0.2
ADAM_BETAS = (0.8, 0.95)
device = torch.device("cuda:7")
torch.zeros(1, device=device)

def get_lr_multiplier(progress):
    return 1 - progress

def get_muon_momentum(step):
    return min(1, step)

def get_weight_decay(progress):
    return WEIGHT_DECAY * (1 - progress)
"""
MODDED = """
import sys
with open(sys.argv[0]) as f:
    code = f.read()
from pathlib import Path
import torch
import torch.nn.functional as F
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self, dim, head_dim=128):
        super().__init__()
        assert head_dim == dim // 2

class GPT(nn.Module):
    def __init__(self, vocab_size, num_layers, model_dim):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, model_dim).bfloat16()
        self.blocks = nn.ModuleList(Block(model_dim) for _ in range(num_layers))
        self.proj = nn.Linear(model_dim, vocab_size)

    def forward(self, inputs, targets):
        logits = self.proj(self.embed(inputs))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

class Optimizer(torch.optim.SGD):
    def step(self):
        assert dist.get_world_size() == 1 and dist.get_rank() == 0
        super().step()

dist.init_process_group(backend="nccl")
model = GPT(vocab_size=50304, num_layers=12, model_dim=768).cuda()
for _ in range(int(sys.argv[-1])):
    train_steps = 3250
    for p in model.parameters():
        p.data.zero_()
    optimizers = [Optimizer(model.parameters(), lr=1.0)]
    for group in optimizers[0].param_groups:
        group["initial_lr"] = group["lr"]

    def set_hparams(step, cooldown_frac=0.7):
        for group in optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / train_steps)

    model.train(no_such_argument=1)
"""


@pytest.fixture
def nanochat_checkout(tmp_path):
    folder = tmp_path / "chat"
    (folder / "nanochat").mkdir(parents=True)
    (folder / "nanochat" / "gpt.py").write_text(NANOCHAT)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "base_train.py").write_text(BASE_TRAIN)
    return folder


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    for name, text in {"train.py": SCRIPT, "model.py": MODEL, "configurator.py": ""}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def run_script(checkout, monkeypatch):
    """run_script(task) runs the checkout's train.py, and undoes what it changes in this process."""
    monkeypatch.chdir(checkout)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "model", sys.modules["model"])
    monkeypatch.setattr(torch, "randint", torch.randint)
    return nanogpt.train


@pytest.fixture
def given(dense, tmp_path, checkout):
    """given(n, **overrides) -> the Task of n steps, which are at least three."""

    def make(n, best=False, **overrides):
        (tmp_path / "task").mkdir(exist_ok=True)
        requests = iter([1e-9] * (n - measurements.WARMUP) + [None])  # a step a turn
        config = tiny(**{"dataset": str(dense), **overrides})
        return Task(config, lambda figures: next(requests), best, tmp_path / "task", checkout)

    return make


def our_losses(task, n):
    """Losses of n steps of this loop."""
    model, optimizer, scaler = build(task.naive)
    config, batches = task.naive, (task.batches[step] for step in range(1, n + 1))
    found = (train.train_step(model, optimizer, scaler, batch, config.learning_rate, config) for batch in batches)
    return [float(loss) for loss, _ in found]


# -- the clock


def test_the_clock_skips_the_first_steps_and_times_turns_until_it_is_told_to_end(monkeypatch):
    """Steps of a second each; the first two take a hundred."""
    now, requests, said = 0, iter([0.2, 4, 20, None]), []

    def turn(figures):
        said.append((number, figures["seconds"]))
        return next(requests)

    monkeypatch.setattr(measurements, "synchronized_time", lambda _: now)
    clock = measurements.Clock(torch.device("cpu"), turn)
    clock.start()
    for number in itertools.count(1):
        now += 100 if number <= 2 else 1
        if clock.step(float(number)):
            break
    # At least one step; 4 s at 1 s a step; 20 s, after a lead of two steps that is not timed
    assert said == [(2, 100), (3, 1), (7, 1), (29, 1)] and number == 29
    assert clock.figures().items() >= {"first_step_seconds": 100, "seconds": 1}.items()
    assert clock.losses == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_clock_that_is_not_asked_times_once(monkeypatch):
    monkeypatch.setattr(measurements, "WINDOW", 0)
    clock = measurements.Clock(torch.device("cpu"))
    clock.start()
    assert [clock.step(0.0) for _ in range(3)] == [False, False, True]


# -- what each is given


def test_nanogpt_trains_on_these_batches_from_these_weights_until_the_clock_ends_it(given, run_script):
    task = given(3)
    assert run_script(task) == "--compile=False --dtype=float32"
    assert task.clock.losses == [5.0, 4.9, 4.8]
    assert len(list(task.folder.glob("*.pt"))) == 3  # it ended at once
    for step in range(3):
        inputs, targets, weights, keys = torch.load(task.folder / f"{step}.pt")
        assert torch.equal(inputs, task.batches[step + 1].inputs)
        assert torch.equal(targets, task.batches[step + 1].targets)
        assert torch.equal(weights["lm_head.weight"], task.model().head.weight)
    expected = {"n_layer": "2", "learning_rate": "0.01", "decay_lr": "False", "eval_iters": "0", "log_interval": "1"}
    assert expected.items() <= keys.items()


def test_nanogpt_needs_a_checkout_and_reads_no_documents(given, documents, run_script):
    with pytest.raises(BadInput, match="needs a checkout: --nanogpt=PATH"):
        task.measure(tiny(dataset=str(documents)), peer="nanogpt")
    with pytest.raises(BadInput, match="not separate documents"):
        run_script(given(3, dataset=str(documents)))


def test_nanochat_trains_its_own_model_of_this_shape_on_these_batches(given, nanochat_checkout, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    monkeypatch.setitem(os.environ, "NANOCHAT_DTYPE", "")  # restored afterwards
    task = given(3, best=True)
    task.checkout = nanochat_checkout
    assert nanochat.train(task) == "torch.compile, float32, 0.0 M parameters"
    module, config = sys.modules.pop("nanochat.gpt"), task.naive
    del sys.modules["nanochat"]
    shape = (config.context_length, config.vocab_size, config.n_layer, config.n_head, config.n_head, config.n_embd, "L")
    assert module.DTYPE == "float32" and len(module.seen) == 3
    for step, (its, inputs, targets) in enumerate(module.seen, 1):
        assert dataclasses.astuple(its) == shape
        assert torch.equal(inputs, task.batches[step].inputs) and torch.equal(targets, task.batches[step].targets)
    losses = task.clock.losses
    assert losses[0] == pytest.approx(math.log(config.vocab_size)) and losses[2] < losses[1] < losses[0]


@pytest.fixture
def checkout_of(nanochat_checkout, tmp_path):
    """checkout_of(peer) -> a folder with the interface of its repository."""

    def make(peer):
        if peer == "nanochat":
            return nanochat_checkout
        file, _ = recipes.CHECKOUTS[peer]
        (tmp_path / peer / file).parent.mkdir(parents=True)
        (tmp_path / peer / file).write_text({"autoresearch": AUTORESEARCH, "modded": MODDED}[peer])
        return tmp_path / peer

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "dtype"), [*((peer, "float32") for peer in recipes.RECIPES), ("autoresearch", "bfloat16")]
)
def test_a_config_is_trained_by_another_project_s_recipe(peer, dtype, checkout_of, dense, tmp_path):
    words = [*flags(dataset=dense, n_head=2, max_steps=4, dtype=dtype), f"--out_dir={tmp_path / 'run'}"]
    done = python("-m", "lab.measure.peers.recipes", peer, checkout_of(peer), "0.5", *words)
    assert done.returncode == 0, done.stderr
    first, *_, last = rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4 and last["tokens"] == 256
    vocab_size = open_dataset(tiny(dataset=str(dense))).vocab_size
    assert first["train_loss"] == pytest.approx(math.log(vocab_size), rel=1e-6 if dtype == "float32" else 1e-2)
    assert last["train_loss"] < first["train_loss"] and 0 < last["val_bpb"] != last["val_loss"]


@pytest.mark.parametrize(("peer", "momenta"), [("nanochat", [0.5, 0.5, 0.5]), ("autoresearch", [0, 1, 1])])
def test_rates_follow_the_script_s_own_functions(peer, momenta, checkout_of, dense, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(os.environ, "NANOCHAT_DTYPE", "")  # restored afterwards
    config = replace(tiny(dataset=str(dense), n_head=2, max_steps=4), vocab_size=40)
    task = recipes.Task(config, checkout_of(peer), torch.device("cpu"), "float32")
    recipe = recipes.RECIPES[peer](task)
    (group,) = recipe.optimizers[0].param_groups
    found = []
    for step in range(3):
        recipe.set_rates(step)
        found.append((group["lr"] / group["initial_lr"], group["momentum"], group["weight_decay"]))
    decay = {"nanochat": lambda share: 0.25 * share**0.5, "autoresearch": lambda share: 0.2 * share}[peer]
    shares = [1.0, 0.75, 0.5]
    assert found == [(share, momentum, decay(share)) for share, momentum in zip(shares, momenta, strict=True)]
    sys.modules.pop("nanochat.gpt", None), sys.modules.pop("nanochat", None)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_hugging_faces_trainer_has_the_losses_of_this_loop(bias, given):
    from lab.measure.peers import huggingface  # loads slowly

    task = given(4, bias=bias)
    huggingface.train(task)
    losses = [float(loss) for loss in task.clock.losses]
    assert losses == pytest.approx(our_losses(task, 4), abs=1e-3)
    assert losses[0] == pytest.approx(our_losses(task, 1)[0], abs=1e-6)


@pytest.mark.slow
def test_lightning_has_the_losses_of_this_loop(given):
    from lab.measure.peers import lightning  # loads slowly

    task = given(4)
    lightning.train(task)
    assert [float(loss) for loss in task.clock.losses] == pytest.approx(our_losses(task, 4), abs=1e-6)


# -- the mode


def test_every_peer_is_a_row_beside_naive_and_the_finished_loop_and_says_why_it_was_not_measured(
    monkeypatch, dense, tmp_path, checkout, nanochat_checkout
):
    asked, path, chat = [], str(checkout), str(nanochat_checkout)

    class Processes(FakeTurns):
        def __init__(self, function, config, peer, best, checkout, live):
            super().__init__()
            assert function is task.measure and live and checkout == {"nanogpt": path, "nanochat": chat}.get(peer)
            self.given = config, peer, best

        def figures(self):
            config, peer, best = self.given
            asked.append((peer, best))
            if peer in ("lightning", "huggingface"):
                reasons = {"lightning": "no such precision", "huggingface": "No module named 'accelerate'"}
                raise RuntimeError(reasons[peer])
            seconds = {"ours": 1.0, "nanogpt": 2.0, "nanochat": 4.0}[peer] + 1.5 * (config.adamw_impl == "forloop")
            figures = {"seconds": seconds, "first_step_seconds": 9.0, "resident_bytes": 3e9, "tokens": 64, "peak": None}
            return figures | {"losses": [5.0, 4.0 + (best and peer != "ours")], "setting": "--x=1"}

    monkeypatch.setattr(modes, "Processes", Processes)
    found = {measurements.free_memory: 1e12, measurements.machine_facts: MACHINE}
    monkeypatch.setattr(modes, "run_alone", lambda function, _: found[function])
    keys = [word for word in flags(dataset=dense) if not word.startswith("--adamw_impl=")]  # a key goes before a stage
    modes.main([*keys, "--mode=peers", f"--nanogpt={path}", f"--nanochat={chat}", f"--out_dir={tmp_path}"])
    turn = [("ours", True), ("ours", True), ("nanogpt", False), ("nanogpt", True), ("nanochat", True)]
    failing = [(peer, best) for peer in ("huggingface", "lightning") for best in (False, True)]
    assert asked == [*turn, *failing, *turn * (turns.ROUNDS - 1)]
    text = (tmp_path / "table.md").read_text()
    rows = {cells[1]: cells for line in text.splitlines() if len(cells := [c.strip() for c in line.split("|")]) > 2}
    by = {name: dict(zip(rows[""], cells, strict=False)) for name, cells in rows.items()}
    assert by["as configured"]["against naive"] == "2.50× (2.50–2.50)" and by["naive"]["resident GB"] == "3.00"
    assert by["nanoGPT"]["ms/step"] == "2000" and by["nanoGPT"]["losses against naive"] == "bit-equal"
    assert by["nanoGPT, compiled"]["losses against naive"] == "WRONG by 1"
    assert by["nanochat, compiled"]["losses against naive"] == "another update"
    assert by["nanoGPT"]["setting"] == "--x=1" and rows["Lightning"][2] == "no such precision"
    assert rows["Hugging Face Trainer"][2] == "No module named 'accelerate'"


# -- for real


@pytest.mark.slow
def test_a_process_measures_a_peer(dense, checkout):
    config = tiny(dataset=str(dense))
    found = []
    for peer in ("ours", "nanogpt"):
        with Processes(task.measure, config, live=True, peer=peer, checkout=checkout) as processes:
            processes.answer()
            for _ in range(LEAST_TURNS):
                processes.ask(TURN)
            found.append(processes.end())
    ours, theirs = found
    assert len(ours["losses"]) == len(theirs["losses"]) == 5
    assert theirs["losses"][:2] == [5.0, 4.9] and np.isfinite(ours["losses"]).all()
    assert min(ours["seconds"], theirs["seconds"]) > 0 and ours["tokens"] == 64
