"""The second ladder: every rung changes only what it says, and all rungs together train, resume and generate."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import RECIPE, build, replace, rows, tiny, weights
from safetensors.torch import load_file

import convert
import train
from model import GPT
from nanoladder import checkpoint
from nanoladder.config import Config, stages
from nanoladder.errors import BadInput
from nanoladder.parallel import checks

RUNGS = stages.stage_names(stages.RECIPE_DIR)
CPU = torch.device("cpu")


def batch(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (2, 4, config.context_length), generator=generator).unbind()


def of_rung(name, **keys):
    """The tiny config with the rungs up to this one."""
    fields = {field: value for rung in stages.stage_path(name) for field, value in stages.fields(rung).items()}
    return tiny(vocab_size=40, **{field: eval(value) for field, value in fields.items()}, **keys)


def test_the_base_is_the_default_and_the_rungs_change_each_field_of_the_recipe():
    base, fields = stages.fields("base"), {}
    for name in RUNGS[1:]:
        fields |= stages.fields(name)
    assert base.keys() == fields.keys() == RECIPE.keys()
    assert all(eval(value) == getattr(Config(), field) for field, value in base.items())
    assert all(eval(value) != getattr(Config(), field) for field, value in fields.items() if field != "head_lr")


@pytest.mark.parametrize("n_layer, in_order", [(3, [2, 0]), (4, [3, 1])])
def test_the_last_block_and_every_second_one_before_it_have_a_value_embedding(n_layer, in_order):
    model = GPT(of_rung("value_embedding", n_layer=n_layer))
    tokens, _ = batch(model.config)
    values = model.embed_values(tokens)
    for block, table in zip(in_order, model.value_embeddings, strict=True):
        assert torch.equal(values[block], 0.5 * table(tokens))
    assert [value for n, value in enumerate(values) if n not in in_order] == [0.0] * (n_layer - 2)


@functools.cache
def loss_after_five_steps(name):
    """Loss of the tiny config with the rungs up to this one."""
    config = of_rung(name)
    model, optimizer, scaler = build(config)
    for step in range(1, 6):
        inputs = train.data.Batch(*batch(config, step))
        train.train_step(model, optimizer, scaler, inputs, train.learning_rate(step, config), config)
    return model(*batch(config)).item()


@pytest.mark.parametrize("name", RUNGS[1:])
def test_a_rung_changes_the_model_its_update_or_its_schedule_and_shares_all_common_weights(name):
    below, config = stages.stage_below(name), of_rung(name)
    ours, theirs = GPT(of_rung(below)).state_dict(), GPT(config).state_dict()
    begun_as_zero = {key for key in ours if name == "zero_init" and key.endswith("proj.weight")}
    if not config.tie_embeddings:
        begun_as_zero.add("head.weight")  # drawn by its own name
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() & theirs.keys() - begun_as_zero)
    loss = loss_after_five_steps(name)
    assert math.isfinite(loss) and loss != loss_after_five_steps(below)


def test_the_recipe_resumes_bit_for_bit_and_its_model_is_loaded_and_exported(dense, tmp_path):
    keys = {"dataset": str(dense), "save_interval": 3, "eval_interval": 3, "pad_vocab_to": 64, **RECIPE}
    whole, halves = (tiny(out_dir=str(tmp_path / name), **keys) for name in ("whole", "halves"))
    train.train(whole)
    train.train(replace(halves, max_steps=3, lr_decay_steps=6))
    train.train(replace(halves, init_from="resume"))
    assert rows(whole)[-1]["val_loss"] == rows(halves)[-1]["val_loss"]
    assert all(torch.equal(one, weights(halves)[name]) for name, one in weights(whole).items())
    state = checkpoint.load_model(tmp_path / "whole" / "last.safetensors")
    gpt = checkpoint.build_gpt(state, "whole")
    assert gpt.config.position == "rotary" and gpt.head.weight is not gpt.token_embedding.weight
    assert torch.equal(gpt.blocks[0].mlp.fc.weight, weights(whole)["blocks.0.mlp.fc.weight"])
    convert.main([f"--out_dir={whole.out_dir}", "--checkpoint=last", f"--output={tmp_path / 'hf'}"])
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(gpt.blocks[0].mlp.fc.weight, exported["model.blocks.0.mlp.fc.weight"])


@pytest.mark.parametrize("checkpointing", ["every:1", "every:2", "sqrt", "selective"])
def test_recomputed_blocks_get_the_embeddings_again(checkpointing):
    gradients = []
    for kind in ("none", checkpointing):
        model, *_ = build(
            tiny(vocab_size=40, n_layer=4, **{**RECIPE, "zero_init": False}, activation_checkpointing=kind)
        )
        model(*batch(model.config)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) and one.any() for one, other in zip(*gradients, strict=True))


def test_rotary_scores_depend_only_on_the_distance():
    rotary = GPT(of_rung("rotary")).blocks[0].attention.rotary
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 16, 16).unbind()
    scores = (rotary(q) @ rotary(k).transpose(-2, -1))[0, 0]
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[:, 0].std() > 0.01


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_attention_gets_queries_and_keys_in_the_dtype_of_values(position, monkeypatch):
    """CUDA's autocast, unlike a CPU's, normalizes in float32, which no flash kernel takes and doubles messages."""
    rms_norm = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda x, *args: rms_norm(x.float(), *args))
    attention = GPT(tiny(vocab_size=40, qk_norm=True, position=position)).blocks[0].attention
    seen = []
    monkeypatch.setattr(attention, "attend", lambda q, k, v: seen.extend([q.dtype, k.dtype, v.dtype]) or v)
    with torch.autocast("cpu", torch.bfloat16):
        attention(torch.randn(2, 16, 32))
    assert seen == [torch.bfloat16] * 3


def test_exclusive_attention_returns_nothing_of_a_positions_own_value():
    attention = GPT(of_rung("exclusive_attention")).blocks[0].attention
    attended, values, outputs = torch.randn(2, 2, 16, 16), [], []
    attention.attend = lambda q, k, v: values.append(v) or attended
    attention.proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    attention(torch.randn(2, 16, 32), value_term=0.0)
    output = outputs[0].unflatten(2, (2, 16)).transpose(1, 2)  # (B, nh, T, hs)
    (own,), zeros = values, torch.zeros(2, 2, 16)
    torch.testing.assert_close((output * own).sum(3), zeros, atol=1e-5, rtol=0)
    left_out = attended - output  # only along the own value
    torch.testing.assert_close(F.cosine_similarity(left_out, own, dim=3).abs(), zeros + 1)


def test_the_input_of_a_block_is_mixed_with_the_embedding():
    block = GPT(tiny(vocab_size=40, x0_skip=True)).blocks[0]
    x, y, embedded = torch.randn(3, 2, 16, 32)
    torch.testing.assert_close(block(x, embedded), block(x, y))  # not initially
    with torch.no_grad():
        block.lambdas.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(block(x, embedded), block(y, embedded))
    assert not torch.allclose(block(x, embedded), block(x, y))


def test_every_parameter_is_in_one_group_with_its_rate():
    config = tiny(vocab_size=40, **RECIPE)
    model, optimizer, _ = build(config)
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(found) == len(set(found)) and set(found) == set(model.parameters())
    rates = {p: group.get("lr_factor", 1) for group in optimizer.param_groups for p in group["params"]}
    assert rates[model.token_embedding.weight] == rates[model.value_embeddings[0].weight] == 4
    assert rates[model.head.weight] == 0.5 and rates[model.blocks[0].mlp.fc.weight] == 1
    assert rates[model.smear] == rates[model.value_lambdas] == rates[model.blocks[0].lambdas] == 2


def test_the_trapezoid_is_flat_for_half_the_run():
    config = tiny(schedule="trapezoid", warmup_steps=10, max_steps=110, learning_rate=1.0, min_lr=0.0)
    rates = [train.learning_rate(step, config) for step in (5, 10, 60, 85, 110)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_step_with_all_rungs_compiles_into_one_graph():
    config = tiny(vocab_size=40, **RECIPE, compile=True, loss_chunks=2, pad_vocab_to=64)
    train.train_step(*build(config), train.data.Batch(*batch(config)), 1e-3, config)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_sampled_softmax_is_of_training_only():
    everything, sampled = (GPT(dataclasses.replace(of_rung("smear"), sampled_softmax=n)) for n in (0, 3))
    tokens, targets = batch(everything.config)
    targets = targets.clamp(max=4)  # of 40 tokens
    assert not torch.equal(everything(tokens, targets), sampled(tokens, targets))
    assert not torch.equal(sampled(tokens, targets), sampled(tokens, targets))  # others are drawn each time
    assert torch.equal(everything.eval()(tokens, targets), sampled.eval()(tokens, targets))
    assert torch.equal(everything.logits(tokens), sampled.train().logits(tokens))


IN_PARTS = [("x0_skip", True), ("value_embedding", True), ("smear", True), ("sampled_softmax", 9)]
IN_A_PIPELINE = [("tie_embeddings", False), ("embedding_norm", True), ("position", "rotary")]


@pytest.mark.parametrize(
    "dimension, key, value",
    [("tensor", *rung) for rung in IN_PARTS] + [("pipeline", *rung) for rung in [*IN_PARTS, *IN_A_PIPELINE]],
)
def test_a_divided_model_refuses_rungs_that_need_the_whole(dimension, key, value):
    with pytest.raises(BadInput, match=f"{key}={value} does not work in 2 {dimension} processes"):
        checks.check_grid(dataclasses.replace(tiny(), **{key: value}), checks.Grid(**{dimension: 2}), CPU)
