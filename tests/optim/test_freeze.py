"""Frozen weights stay as they are, bit for bit, and cost neither a gradient nor optimizer state. The others learn."""

from typing import get_args

import pytest
import torch
from conftest import build, flags, replace, rows, same, saved, tiny, weights
from processes import configuration, words, work

import train
from model import GPT
from nanoladder import config as keys_of_config
from nanoladder.data import Batch
from nanoladder.run.metrics import flops_per_token

SHAPE = {"n_layer": 3, "n_embd": 64, "vocab_size": 250, "bias": True, "pad_vocab_to": 64}
EMBEDDINGS = {"token_embedding.weight", "position_embedding.weight"}
OPTIMIZERS = get_args(keys_of_config.TYPES["optimizer"])


def batch_of(config, step=0):
    shape = 2, config.batch_size, config.context_length
    return Batch(*torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(step)).unbind())


def is_frozen(name, n_blocks):
    return name in EMBEDDINGS or name.startswith(tuple(f"blocks.{n}." for n in range(n_blocks)))


def after_steps(config, n=3):
    """Weights before and after n steps, the optimizer's state by weight, and the norms."""
    model, optimizer = build(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    before = {name: parameter.detach().clone() for parameter, name in names.items()}
    run = model, optimizer
    norms = [train.train_step(*run, batch_of(config, step), 1e-2, config)[1].item() for step in range(n)]
    gradients = {name for parameter, name in names.items() if parameter.grad is not None}
    after = {name: parameter.detach() for parameter, name in names.items()}
    return before, after, {names[p] for p, state in optimizer.state.items() if state}, gradients, norms


WAYS = {
    "all at once": {},
    "micro-batches": {"micro_batch_size": 2},
    "chunks": {"loss_chunks": 3, "attention": "sdpa"},
    "checkpointing": {"checkpointing": "every:1"},
    "selective": {"checkpointing": "selective", "attention": "sdpa"},
    "segments": {"checkpointing": "sqrt"},
    "kept gradients": {"set_to_none": False},
    "in backward": {"optimizer_in_backward": True, "grad_clip": 0.0},
    "float16": {"dtype": "float16", "attention": "sdpa"},
    "bfloat16, fused": {"dtype": "bfloat16", "attention": "sdpa", "adamw_impl": "fused"},
}
EACH = [({"freeze": freeze}, way) for freeze in ("embeddings", "blocks:2") for way in WAYS]
EACH += [({"freeze": "blocks:3"}, "all at once"), ({"freeze": "blocks:3"}, "in backward")]
EACH += [({"freeze": "blocks:1", "optimizer": name}, way) for name in OPTIMIZERS for way in ("chunks", "in backward")]


@pytest.mark.parametrize(
    "keys, way", EACH, ids=lambda value: value if isinstance(value, str) else "-".join(value.values())
)
def test_frozen_weights_stay_and_the_others_learn(keys, way):
    config = tiny(**SHAPE, **keys, **WAYS[way])
    n_blocks = int(config.freeze.removeprefix("blocks:")) if config.freeze != "embeddings" else 0
    before, after, with_state, with_gradient, norms = after_steps(config)
    frozen = {name for name in before if is_frozen(name, n_blocks)}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert with_state == before.keys() - frozen or (config.optimizer == "sgd" and not with_state)
    assert with_gradient == (set() if config.optimizer_in_backward else before.keys() - frozen)
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("in backward", "bfloat16, fused", "float16")])
@pytest.mark.parametrize("freeze", ["embeddings", "blocks:2"])
def test_the_others_learn_from_the_same_gradients_as_without(freeze, way):
    """The gradient of a weight does not depend on others being frozen, neither does the loss; the norm counts fewer."""
    found = {}
    for key in ("none", freeze):
        config = tiny(**SHAPE, **WAYS[way], freeze=key)
        model, _ = build(config)
        loss = train.forward_backward(model, batch_of(config), config)
        found[key] = loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    (loss, whole), (same_loss, part) = found["none"], found[freeze]
    assert torch.equal(loss, same_loss) and len(part) < len(whole)
    for name, gradient in part.items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-7, rtol=1e-5)


def test_nothing_is_kept_of_frozen_blocks_for_the_backward():
    """Below the lowest weight that learns, no operation is recorded, so no activation is kept."""
    saved_bytes = {}
    for freeze in ("none", "embeddings", "blocks:1", "blocks:2"):
        config = tiny(**SHAPE, freeze=freeze)
        model, total = build(config)[0], 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*batch_of(config))
        saved_bytes[freeze] = total
    block = saved_bytes["blocks:1"] - saved_bytes["blocks:2"]
    assert block > 0 and saved_bytes["embeddings"] - saved_bytes["blocks:1"] == pytest.approx(block, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "freeze, keys",
    [("embeddings", {}), ("blocks:2", {"compile_scope": "block"}), ("blocks:2", {"loss_chunks": 2})],
    ids=str,
)
def test_compiled(freeze, keys, traced):
    config = tiny(**SHAPE, freeze=freeze, compile=True, attention="sdpa", **keys)
    before, after, with_state, _, norms = after_steps(config)
    *_, expected = after_steps(replace(config, compile=False))
    frozen = {name for name in before if is_frozen(name, 2 if freeze == "blocks:2" else 0)}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert with_state == before.keys() - frozen
    assert norms == pytest.approx(expected, rel=1e-3)


# -- runs


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), n_layer=3, dropout=0.1, freeze="blocks:1")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion"])
def test_train_stop_resume_equals_one_run_bit_for_bit(optimizer, config, tmp_path):
    one = replace(config, optimizer=optimizer)
    two = replace(one, out_dir=str(tmp_path / "two"))
    train.train(one)
    train.train(replace(two, max_steps=3, lr_decay_steps=6))
    train.train(replace(two, init_from="resume", lr_decay_steps=6))
    for part in ("model", "optimizer"):
        assert same(saved(one)[part], saved(two)[part])
    assert (
        "blocks.0.mlp.fc.weight" not in saved(one)["optimizer"] and "blocks.1.mlp.fc.weight" in saved(one)["optimizer"]
    )


def test_another_choice_starts_a_new_run_from_the_weights(config, tmp_path, refused):
    train.train(config)
    line = refused(train.main, *words(replace(config, init_from="resume", freeze="none", max_steps=9)))
    assert "freeze=blocks:1" in line and f"--init_from={config.out_dir}/last.safetensors" in line
    path = f"{config.out_dir}/last.safetensors"
    thawed = replace(config, out_dir=str(tmp_path / "thawed"), init_from=path, freeze="none")
    train.train(thawed)
    assert not torch.equal(weights(thawed)["blocks.0.mlp.fc.weight"], weights(config)["blocks.0.mlp.fc.weight"])


def test_arithmetic_of_a_frozen_model():
    """A third for frozen blocks, two thirds for the head; counted in multiplications of matrices and of attention."""
    shape = {"n_layer": 3, "n_embd": 32, "context_length": 16, "vocab_size": 100}
    model = GPT(tiny(**shape))
    block = sum(p.numel() for p in model.blocks[0].parameters())
    head, attention = 100 * 32, 4 * 32 * 16
    forward = 2 * (model.n_params - 16 * 32) + 3 * attention
    for freeze, n_blocks in [("embeddings", 0), ("blocks:1", 1), ("blocks:3", 3)]:
        backward = (3 - n_blocks) * (4 * block + 2 * attention) + 4 * 32 + 2 * head  # 4 · 32 of the last norm
        assert flops_per_token(GPT(tiny(**shape, freeze=freeze))) == forward + backward
    assert flops_per_token(model) == 3 * forward


@pytest.mark.parametrize(
    "freeze", ["blocks:0", "blocks:", "blocks:-1", "blocks:1.5", "blocks", "head", "all", "", "none "]
)
def test_another_word_is_refused(freeze, refused):
    assert "blocks:K" in refused(train.main, *flags(freeze=freeze))


# -- several processes

LAYOUTS = {
    "ddp": {},
    "ddp, micro-batches": {"micro_batch_size": 1},
    "optimizer": {"shard": "optimizer", "micro_batch_size": 1},
    "full": {"shard": "full", "checkpointing": "every:1", "loss_chunks": 2, "attention": "sdpa"},
    "tensor": {"tensor_parallel": 2, "pad_vocab_to": 64},
    "context": {"context_parallel": 2, "attention": "sdpa"},
}


@pytest.mark.slow
def test_two_processes_train_as_one_does(dense, documents, tmp_path):
    def configured(name, **keys):
        run = {"n_layer": 3, "freeze": keys.pop("freeze", "blocks:1"), "optimizer": "sgd", "learning_rate": 1e-3}
        return configuration(dense, documents, tmp_path / name, **run, **keys)

    alone, first = configured("alone"), configured("first", max_steps=0)
    train.train(alone)
    initial = GPT(replace(first, vocab_size=17)).state_dict()
    two = {name: configured(name, **keys) for name, keys in LAYOUTS.items()}
    two |= {
        f"{name}, embeddings": configured(f"{name}, embeddings", freeze="embeddings", **LAYOUTS[name])
        for name in LAYOUTS
    }
    result, seen = work(tmp_path / "work", {name: {"argv": words(config)} for name, config in two.items()}, 2)
    assert result.returncode == 0, result.stderr
    assert not any(job["error"] for process in seen for job in process.values())
    for name, config in two.items():
        found = weights(config)
        for key, weight in initial.items():
            weight = weight[:17] if weight.shape[0] == 17 else weight
            stays = key == "head.weight" or is_frozen(key, 0 if "embeddings" in name else 1)
            assert torch.equal(found[key][: len(weight)], weight) == stays, (name, key)
        if "embeddings" not in name:
            for one, other in zip(
                rows(config, "train_loss", "grad_norm"), rows(alone, "train_loss", "grad_norm"), strict=True
            ):
                assert one == pytest.approx(other, rel=1e-4), name
