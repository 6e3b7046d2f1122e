"""A non-finite step changes nothing, is reported, and ends the run before it saves."""

import math
import re

import pytest
import torch
from conftest import at_step, build, needs_gpu, rows, same, saved, spoil_positions, tiny, weights, words

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
    model, optimizer = build(config)
    train.train_step(model, optimizer, batch(config), 1e-2, config)
    model.norm.weight.data[3] = value
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    before += [{name: tensor.clone() for name, tensor in state.items()} for state in optimizer.state.values()]
    loss, norm = train.train_step(model, optimizer, batch(config), 1e-2, config)
    assert not math.isfinite(loss + norm)
    before[0]["norm.weight"][3] = model.norm.weight.data[3] = 0.0  # NaN is not equal to itself
    assert same(dict(enumerate(before)), dict(enumerate([model.state_dict(), *optimizer.state.values()])))


@needs_gpu
@pytest.mark.parametrize("keys", [{}, IN_BACKWARD], ids=["after the backward", "in the backward"])
def test_a_gpu_s_fused_kernel_skips_the_update_by_itself(keys):
    config = tiny(vocab_size=8, device="cuda", adamw_impl="fused", lazy_metrics=True, **keys)
    model, optimizer = build(config, "cuda")
    tokens = batch(config).to("cuda")
    train.train_step(model, optimizer, tokens, 1e-2, config)
    norm = model.norm.weight.data.clone()
    model.norm.weight.data[3] = math.nan
    head = model.head.weight.detach().clone()
    train.train_step(model, optimizer, tokens, 1e-2, config)
    assert torch.equal(model.head.weight, head)
    model.norm.weight.data = norm
    train.train_step(model, optimizer, tokens, 1e-2, config)
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
    watch = faults.Watch(tiny(), torch.device("cuda"), UNSCALED)
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


def test_gradients_of_exactly_0_are_a_fault(config, run_main, monkeypatch):
    def lose(model, batch):
        for parameter in model.parameters():
            parameter.register_hook(torch.zeros_like)

    monkeypatch.setattr(train, "train_step", at_step(7, lose))
    line = run_main(train.main, *words(config)).err
    assert re.search(r"stopped at step 7: loss [\d.]+, gradient norm 0\.0,", line)
    assert saved(config)["progress"]["step"] == 6 and "--compile=False" in line


# -- float16


def test_an_overflow_in_float16_is_not_a_fault_but_a_collapsed_loss_scale_is(config, run_main, monkeypatch):
    def overflow(model, batch):
        model.position_embedding.weight.register_hook(lambda gradient: gradient * math.inf)

    monkeypatch.setattr(train, "train_step", at_step(3, overflow))
    result = run_main(train.main, *words(config, dtype="float16"))
    step = int(re.search(r"stopped at step (\d+): .* loss scale 0\.5, which collapsed", result.err)[1])
    assert step == 3 + 16  # from 2**16 to 1/2, halved at each step
    assert "loss nan" not in result.err
