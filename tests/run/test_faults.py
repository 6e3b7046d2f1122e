"""A non-finite step changes nothing, is reported, and ends the run before it saves."""

import math
import os
import re
import signal

import pytest
import torch
from conftest import (
    at_step,
    build,
    contents,
    needs_gpu,
    replace,
    rows,
    same,
    saved,
    spoil_positions,
    tiny,
    weights,
    words,
)

import train
from nanoladder.data import Batch
from nanoladder.run import faults

UNSCALED = torch.amp.GradScaler(enabled=False)
LOOP = {"float32": {}, "fused": {"adamw_impl": "fused"}, "bfloat16": {"dtype": "bfloat16"}}
IN_BACKWARD = {"optimizer_in_backward": True, "grad_clip": 0.0}
LOOP |= {"in the backward": IN_BACKWARD, "fused, in the backward": {"adamw_impl": "fused", **IN_BACKWARD}}


def batch(config):
    tokens = torch.arange(config.batch_size * config.context_length).reshape(config.batch_size, -1) % 7
    return Batch(tokens, tokens)


@pytest.mark.parametrize("keys", LOOP.values(), ids=LOOP)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_applied(keys, value):
    config = tiny(vocab_size=8, **keys)
    model, optimizer, scaler = build(config)
    train.train_step(model, optimizer, scaler, batch(config), 1e-2, config)
    model.norm.weight.data[3] = value
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    before += [{name: tensor.clone() for name, tensor in state.items()} for state in optimizer.state.values()]
    loss, norm = train.train_step(model, optimizer, scaler, batch(config), 1e-2, config)
    assert not math.isfinite(loss + norm)
    before[0]["norm.weight"][3] = model.norm.weight.data[3] = 0.0  # NaN is not equal to itself
    assert same(dict(enumerate(before)), dict(enumerate([model.state_dict(), *optimizer.state.values()])))


@needs_gpu
@pytest.mark.parametrize("keys", [{}, IN_BACKWARD], ids=["after the backward", "in the backward"])
def test_a_gpu_s_fused_kernel_skips_the_update_by_itself(keys):
    config = tiny(vocab_size=8, device="cuda", adamw_impl="fused", lazy_metrics=True, **keys)
    model, optimizer, scaler = build(config, "cuda")
    tokens = batch(config).to("cuda")
    train.train_step(model, optimizer, scaler, tokens, 1e-2, config)
    norm = model.norm.weight.data.clone()
    model.norm.weight.data[3] = math.nan
    head = model.head.weight.detach().clone()
    train.train_step(model, optimizer, scaler, tokens, 1e-2, config)
    assert torch.equal(model.head.weight, head)
    model.norm.weight.data = norm
    train.train_step(model, optimizer, scaler, tokens, 1e-2, config)
    assert not torch.equal(model.head.weight, head)


class Lazy:
    """A number that counts its reads."""

    reads = 0

    def __init__(self, value):
        self.value = value

    def __float__(self):
        Lazy.reads += 1
        return self.value


def test_a_gpu_s_results_are_read_only_when_they_are_due(capsys, monkeypatch):
    watch = faults.Watch(tiny(vocab_size=17), torch.device("cuda"), UNSCALED)
    for step in range(1, 10):
        watch.check(step, 1e-3, Lazy(1.0), Lazy(2.0), due=step == 9)
        assert Lazy.reads == (18 if step == 9 else 0)
    monkeypatch.setattr(faults, "LOOK", 3)  # or after so many steps
    for step in range(10, 13):
        watch.check(step, 1e-3, Lazy(1.0), Lazy(2.0), due=False)
        assert Lazy.reads == (24 if step == 12 else 18)
    watch.check(10, 1e-3, Lazy(math.nan), Lazy(2.0), due=False)
    with pytest.raises(SystemExit):
        watch.check(11, 1e-3, Lazy(1.0), Lazy(2.0), due=True)
    assert "stopped at step 10: loss nan, gradient norm 2.0, learning rate 0.001" in capsys.readouterr().err


# -- whole runs


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), max_steps=20, save_interval=2, log_interval=5)


def test_a_fault_is_reported_in_one_line_with_the_last_checkpoint(config, run_main, monkeypatch):
    monkeypatch.setattr(train, "train_step", at_step(7, spoil_positions))
    result = run_main(train.main, *words(config))
    line = result.err.strip()
    newest = f"{config.out_dir}/last.safetensors is the newest checkpoint: --init_from=resume continues from it"
    assert result.out.splitlines()[-1] == newest
    assert line.startswith("error: stopped at step 7: loss nan, gradient norm nan, learning rate 0.0")
    assert "Likely causes" in line and "--step=7" in line and "\n" not in line and result.code == 1
    assert saved(config)["progress"]["step"] == 6 and [row["step"] for row in rows(config)] == [5]
    assert all(weight.isfinite().all() for weight in weights(config).values())


def spoil_weight(model, optimizer):
    model.norm.weight.data[3] = math.inf


def spoil_state(model, optimizer):
    optimizer.state[model.norm.weight]["exp_avg"][3] = math.nan


SPOILED = {
    "weight": ({}, spoil_weight, "; its update made norm.weight not finite."),
    "state": ({}, spoil_state, "; its update made optimizer/norm.weight/exp_avg not finite."),
    "signal": ({"save_interval": 100}, spoil_state, "; its update made optimizer/norm.weight/exp_avg not finite."),
    "evaluation": ({"eval_interval": 4}, spoil_weight, ", validation loss nan."),
}


@pytest.mark.parametrize("keys, spoil, said", SPOILED.values(), ids=SPOILED)
def test_a_state_that_is_not_finite_never_replaces_one_that_is(keys, spoil, said, config, run_main, monkeypatch):
    """Step 8 has a finite loss and finite gradients, and is the last one or one that saves for another reason."""
    last = 20 if keys else 8
    theirs = replace(config, max_steps=6, lr_decay_steps=last)
    assert run_main(train.main, *words(theirs)).code == 0
    before, original = contents(config.out_dir), train.train_step

    def step(model, optimizer, *arguments):
        result = original(model, optimizer, *arguments)
        if optimizer.state[model.norm.weight]["step"] == 8:
            spoil(model, optimizer)
            if "save_interval" in keys:
                os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(train, "train_step", step)
    result = run_main(train.main, *words(config, max_steps=last, lr_decay_steps=last, init_from="resume", **keys))
    numbers = r"error: stopped at step 8: loss \d\.\d+, gradient norm \d\.\d+, learning rate 0\.\d+"
    assert result.code == 1 and re.search(numbers + re.escape(said), result.err)
    assert "last.safetensors is the newest checkpoint" in result.out
    names = [name for name in before if name.endswith(".safetensors")]
    assert names and all(contents(config.out_dir)[name] == before[name] for name in names)


def test_gradients_of_exactly_0_are_a_fault(config, run_main, monkeypatch):
    def lose(model, batch):
        for parameter in model.parameters():
            parameter.register_hook(torch.zeros_like)

    monkeypatch.setattr(train, "train_step", at_step(7, lose))
    line = run_main(train.main, *words(config)).err
    assert re.search(r"stopped at step 7: loss [\d.]+, gradient norm 0\.0,", line)
    assert saved(config)["progress"]["step"] == 6 and "--compile=False" in line


def test_a_run_that_ends_at_an_absurd_loss_says_so(config, run_main):
    far = run_main(train.main, *words(config, learning_rate=10.0, max_steps=10))
    assert far.code == 0 and far.err.startswith("warning: the run has diverged: its last loss is ")
    assert "and guessing has 2.83; learning_rate=10.0 is too high" in far.err and far.err.count("\n") == 1
    assert run_main(train.main, *words(config, out_dir=f"{config.out_dir} too")).err == ""


@pytest.mark.parametrize("loss", [1e6, math.log(17)])
def test_gradients_of_0_at_or_after_an_absurd_loss_are_not_pytorch_s_fault(loss, capsys):
    watch = faults.Watch(tiny(vocab_size=17), torch.device("cpu"), UNSCALED)
    watch.check(4, 100.0, 1e6, 1.0, due=True)
    with pytest.raises(SystemExit):
        watch.check(5, 100.0, loss, 0.0, due=True)
    assert "loses the gradients" not in (line := capsys.readouterr().err) and "learning_rate=0.01 is too high" in line


# -- float16


def test_an_overflow_in_float16_is_not_a_fault_but_a_collapsed_loss_scale_is(config, run_main, monkeypatch):
    def overflow(model, batch):
        model.position_embedding.weight.register_hook(lambda gradient: gradient * math.inf)

    monkeypatch.setattr(train, "train_step", at_step(3, overflow))
    result = run_main(train.main, *words(config, dtype="float16"))
    step = int(re.search(r"stopped at step (\d+): .* loss scale 0\.5, which collapsed", result.err)[1])
    assert step == 3 + 16  # from 2**16 to 1/2, halved at each step
    assert "loss nan" not in result.err
