import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import flags, replace, rows, same, saved, tiny, weights
from hypothesis import given
from hypothesis import strategies as st

import train
from model import GPT, IGNORE
from nanoladder.arithmetic import flops_per_token
from nanoladder.config import Config
from nanoladder.data.batches import TrainingBatches
from nanoladder.data.datasets import open_dataset
from nanoladder.run.clock import StepClock


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"))


def run(config, **overrides):
    """Trains in a folder of its own; returns the config of that run."""
    name = "_".join(f"{key}={value}" for key, value in overrides.items()).replace("/", "-")
    config = replace(config, **{"out_dir": f"{config.out_dir}_{name}", **overrides})
    train.train(config)
    return config


def initial_model(config):
    """Model at the start of training."""
    vocab_size = open_dataset(config).vocab_size
    return GPT(replace(config, vocab_size=vocab_size))


def mean_loss(model, inputs, targets):
    logits = model.logits(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


# -- the loop as a whole


def test_the_loss_falls_on_repetitive_text(config):
    done = run(config, max_steps=60, eval_interval=20, log_interval=20)
    losses = [row["val_loss"] for row in rows(done)]
    assert len(losses) == 3 and max(losses) < 2.0 < math.log(17) < rows(run(config, max_steps=1))[0]["train_loss"] + 0.2


@pytest.mark.parametrize("kind", ["dense", "documents"])
def test_training_equals_a_textbook_loop(kind, request, tmp_path):
    """Textbook code: the mean loss, clipping, AdamW with decay only on matrices used in products."""
    dataset = str(request.getfixturevalue(kind))
    config = tiny(
        dataset=dataset, out_dir=str(tmp_path), bias=True, weight_decay=0.3, grad_clip=0.5, beta1=0.8, max_steps=5
    )
    train.train(config)

    model = initial_model(config)
    batches = TrainingBatches(open_dataset(config).train, config)
    parameters = dict(model.named_parameters())
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    for step, row in enumerate(rows(config), 1):
        loss = mean_loss(model, *batches[step])
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert row["train_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        lr, scale = row["lr"], min(1.0, 0.5 / norm.item())
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            mean, square = moments[name]
            mean.lerp_(gradient * scale, 1 - config.beta1)
            square.lerp_((gradient * scale) ** 2, 1 - config.beta2)
            decayed = parameter.dim() == 2 and "position" not in name
            with torch.no_grad():
                parameter *= 1 - lr * config.weight_decay * decayed
                hat = mean / (1 - config.beta1**step), square / (1 - config.beta2**step)
                parameter -= lr * hat[0] / (hat[1].sqrt() + 1e-8)
    for name, weight in weights(config).items():
        if not name.endswith("qkv.bias"):  # the gradient of a key's bias is only noise, which AdamW amplifies
            torch.testing.assert_close(weight, model.state_dict()[name], atol=2e-4, rtol=2e-3, msg=name)


def test_a_run_is_reproducible_bit_for_bit(config):
    ours, again, other = (
        run(config, dropout=0.1, out_dir=f"{config.out_dir}{number}", seed=seed)
        for number, seed in enumerate([1, 1, 2])
    )
    assert same(weights(ours), weights(again)) and rows(ours, "train_loss") == rows(again, "train_loss")
    assert not same(weights(ours), weights(other))


def test_logging_evaluating_and_saving_do_not_change_training(documents, tmp_path):
    config = tiny(dataset=str(documents), out_dir=str(tmp_path / "run"), dropout=0.2)
    quiet = run(config, log_interval=0)
    watched = run(config, log_interval=1, eval_interval=1, save_interval=1)
    assert same(weights(quiet), weights(watched))


# -- evaluation


@pytest.mark.parametrize("kind", ["dense", "documents"])
def test_evaluation_is_the_mean_over_every_target_without_dropout(kind, request, tmp_path):
    dataset = request.getfixturevalue(kind)
    config = tiny(dataset=str(dataset), out_dir=str(tmp_path), dropout=0.3, eval_interval=6, eval_windows=0)
    config = replace(config, batch_size=3)  # the last batch is not full
    train.train(config)
    model = initial_model(config)
    model.load_state_dict(weights(config))
    model.eval()
    ids = torch.from_numpy(np.fromfile(dataset / "val.bin", np.uint16).astype(np.int64))
    T = config.context_length
    texts = [ids]
    if kind == "documents":
        offsets = np.fromfile(dataset / "val.idx", np.uint64).astype(np.int64)
        texts = ids.split(np.diff(offsets).tolist())
    total, count = 0.0, 0
    for text in texts:
        for start in range(0, len(text) - 1, T):
            piece = text[start : start + T + 1]
            if kind == "dense" and len(piece) < T + 1:
                continue
            with torch.no_grad():
                total += mean_loss(model, piece[None, :-1], piece[None, 1:]).item() * (len(piece) - 1)
            count += len(piece) - 1
    row = rows(config)[-1]
    n_bytes, n_targets = 2 * len(ids), len(ids) - len(texts)  # bytes as the folder's meta.json says
    assert row["val_loss"] == pytest.approx(total / count, rel=1e-5)
    assert row["val_bpb"] == pytest.approx(total / count / math.log(2) * n_targets / n_bytes, rel=1e-5)


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(config, monkeypatch):
    losses = [3.0, 2.0, 1.0, 1.5, 1.0, 4.0]
    remaining = iter(losses)
    monkeypatch.setattr(train, "evaluate", lambda *arguments: next(remaining))
    done = run(config, eval_interval=1)
    assert [row["val_loss"] for row in rows(done)] == losses
    assert saved(done, "best")["progress"]["step"] == 3 and saved(done)["progress"]["step"] == 6
    assert saved(done, "best")["progress"]["best_val_loss"] == saved(done)["progress"]["best_val_loss"] == 1.0


# -- the learning rate


schedules = st.builds(
    lambda **given: Config(min_lr=1e-5, **given),
    learning_rate=st.floats(1e-4, 1),
    warmup_steps=st.integers(0, 50),
    lr_decay_steps=st.integers(0, 200),
    max_steps=st.integers(1, 200),
)


@given(schedules)
def test_learning_rate_schedule(config):
    end = config.lr_decay_steps or config.max_steps
    rates = [train.learning_rate(step, config) for step in range(1, 260)]
    assert rates[0] > 0 and max(rates) <= config.learning_rate * (1 + 1e-12)
    warm, decaying, after = rates[: config.warmup_steps], rates[config.warmup_steps : end], rates[end:]
    assert warm == pytest.approx([config.learning_rate * n / len(warm) for n in range(1, len(warm) + 1)])
    assert decaying == sorted(decaying, reverse=True)
    assert end <= config.warmup_steps or rates[end - 1] == config.min_lr
    assert all(rate == config.min_lr for rate in after[max(0, config.warmup_steps - end) :])


def test_half_way_between_warm_up_and_end_the_rate_is_half_decayed():
    config = tiny(learning_rate=1.0, min_lr=0.2, warmup_steps=40, max_steps=140)
    assert train.learning_rate(90, config) == pytest.approx(0.6)


def test_throughput_counts_every_sequence(config, monkeypatch, capsys):
    monkeypatch.setattr(StepClock, "lap", lambda clock: 2.0)
    done = run(config, batch_size=4, micro_batch_size=2, max_steps=6, log_interval=3)
    assert [row["tokens_per_s"] for row in rows(done)] == [2 * 64 / 2.0, 3 * 64 / 2.0]  # without the first step
    out = capsys.readouterr().out
    assert re.findall(r"(\S+) min left", out) == ["0.1"]  # three steps of a second, and none at the end
    assert "6 steps of 4 × 16 tokens, 2 at a time, " in out
    flops = flops_per_token(initial_model(config).config) * 64 * 6
    assert float(re.search(r"([\d.e+-]+) FLOP", out)[1]) == pytest.approx(flops, rel=0.01)


# -- what a run prints and leaves behind


def test_a_run_leaves_the_documented_files(config):
    done = run(config, eval_interval=3)
    names = {path.name for path in Path(done.out_dir).iterdir()}
    checkpoints = {f"{name}.safetensors" for name in ("last", "best", "step_00000003", "step_00000006")}
    assert names == {"config.json", "metrics.jsonl", "tokenizer.json", "tokenizer.tiktoken", ".lock"} | checkpoints
    written = json.loads(Path(done.out_dir, "config.json").read_text())
    assert Config(**written) == replace(done, vocab_size=17)


# -- bad input


def test_an_out_dir_that_cannot_be_written(dense, tmp_path, refused):
    (tmp_path / "file").write_text("a regular file")
    for out_dir in (f"{tmp_path}/file", f"{tmp_path}/file/deeper/run"):
        line = refused(train.main, *flags(dataset=dense, out_dir=out_dir))
        assert f"out_dir={out_dir}" in line and "cannot be written" in line
