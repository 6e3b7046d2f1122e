"""The GPT: causal, its loss summed over valid targets, initialization. Its logits: checkpoint/test_huggingface.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import RECIPE, tiny

from model import GPT, IGNORE

V = 61


def build(seed=0, **overrides):
    return GPT(tiny(vocab_size=V, seed=seed, **overrides))


def tokens(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def shake(model, seed=0):
    """Enlarges the weights, so that a wrong term shows in the logits; moves biases and norms away from 0 and 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gradients(model, inputs, targets):
    model.zero_grad()
    loss = model(inputs, targets) / (targets != IGNORE).sum()
    loss.backward()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("keys", [{}, RECIPE], ids=["naive", "every rung"])
def test_a_later_token_leaves_earlier_logits_unchanged(keys):
    model = shake(build(**keys)).eval()
    inputs = tokens(2, 16)
    before = model.logits(inputs)
    for place in (1, 7, 15):
        changed = inputs.clone()
        changed[:, place] = (changed[:, place] + 1) % V
        after = model.logits(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-6, rtol=0)
        assert ((after[:, place:] - before[:, place:]).abs().amax(-1) > 1e-4).all()  # and every later position sees it


def test_forward_sums_over_the_valid_targets():
    model = shake(build()).eval()
    inputs, targets = tokens(2, 16), tokens(2, 16, seed=1)
    targets[0, 3:9] = targets[1, -1] = IGNORE
    loss_sum = model(inputs, targets)
    log_probabilities = model.logits(inputs)[..., :V].log_softmax(-1)
    by_hand = -sum(log_probabilities[b, t, targets[b, t]] for b in range(2) for t in range(16) if targets[b, t] >= 0)
    torch.testing.assert_close(loss_sum, by_hand)


def test_the_loss_without_valid_targets_is_zero():
    assert build()(tokens(2, 16), torch.full((2, 16), IGNORE)) == 0


def test_the_head_is_tied_and_counted_once():
    model = build()
    assert model.head.weight is model.token_embedding.weight
    C, L, T = 32, 2, 16
    assert model.n_params == V * C + T * C + L * (12 * C * C + 2 * C) + C
    with_bias = build(bias=True)
    assert with_bias.n_params - model.n_params == L * (3 * C + C + 4 * C + C + 2 * C) + C


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("zero_init", [False, True])
def test_initialization(tie_embeddings, zero_init):
    model = build(
        n_layer=8, n_embd=128, context_length=64, bias=True, tie_embeddings=tie_embeddings, zero_init=zero_init
    )
    assert ("head.weight" in dict(model.named_parameters())) == (not tie_embeddings)
    for name, parameter in model.named_parameters():
        if zero_init and name.endswith(("proj.weight", "head.weight")):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 2:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < std / 10, name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


def test_loss_at_initialization_is_that_of_a_uniform_guess():
    loss_sum = build()(tokens(16, 16), tokens(16, 16, seed=1))
    assert (loss_sum / (16 * 16)).item() == pytest.approx(math.log(V), abs=0.05)


def test_initialization_depends_only_on_the_seed_and_the_name():
    ours, other = build(1).state_dict(), build(2).state_dict()
    torch.rand(9)  # the global generator has no effect
    again = build(1).state_dict()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert not torch.equal(ours["head.weight"], other["head.weight"])
    assert not torch.equal(ours["blocks.0.mlp.fc.weight"], ours["blocks.1.mlp.fc.weight"])  # a generator for each name


def test_padding_changes_neither_loss_nor_gradients():
    model = shake(build(context_length=32))
    inputs, targets = tokens(3, 9), tokens(3, 9, seed=1)
    for row, length in enumerate([9, 5, 2]):
        inputs[row, length:], targets[row, length:] = 0, IGNORE
    loss, expected = gradients(model, inputs, targets)
    for columns, n_rows in [(7, 0), (23, 0), (0, 2), (23, 3)]:
        pad = (0, columns, 0, n_rows)
        padded = F.pad(inputs, pad), F.pad(targets, pad, value=IGNORE)
        padded_loss, found = gradients(model, *padded)
        torch.testing.assert_close(padded_loss, loss, atol=1e-6, rtol=1e-6)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_dropout_acts_in_training_only(attention):
    model = shake(build(dropout=0.5, attention=attention))
    inputs = tokens(2, 16)
    assert not torch.equal(model.logits(inputs), model.logits(inputs))
    model.eval()
    assert torch.equal(model.logits(inputs), model.logits(inputs))
    torch.testing.assert_close(model.logits(inputs), shake(build(attention=attention)).logits(inputs))
