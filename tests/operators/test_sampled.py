"""The loss over a sample of the vocabulary: exact where nothing is left out, else right on average."""

import math

import pytest
import torch
import torch.nn.functional as F

from operators import sampled_loss

IGNORE, N_VOCAB, PADDING, WIDTH = -100, 60, 4, 8


def inputs(n_tokens=20, seed=0):
    """hidden, weight and targets; a fifth of the targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_tokens, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(N_VOCAB + PADDING, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(N_VOCAB, (n_tokens,), generator=generator)
    targets[::5] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("n_others", [N_VOCAB, 10_000])
def test_with_all_other_tokens_the_loss_and_its_gradients_are_exact(n_others):
    (hidden, weight, targets), (h, w, _) = inputs(), inputs()
    loss = sampled_loss(hidden, weight, targets, N_VOCAB, n_others, IGNORE)
    exact = F.cross_entropy(h @ w[:N_VOCAB].T, targets, ignore_index=IGNORE, reduction="sum")
    (2 * loss).backward()
    (2 * exact).backward()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(hidden.grad, h.grad)
    torch.testing.assert_close(weight.grad, w.grad)
    assert not weight.grad[N_VOCAB:].any()


@pytest.mark.parametrize("n_others", [0, 5, 30])
def test_only_targets_and_the_tokens_drawn_have_gradients(n_others):
    hidden, weight, targets = inputs()
    sampled_loss(hidden, weight, targets, N_VOCAB, n_others, IGNORE).backward()
    moved = weight.grad.abs().sum(1).nonzero()[:, 0].tolist()
    own = {*targets.tolist()} - {IGNORE}
    assert own <= {*moved} and len(moved) == len(own) + min(n_others, N_VOCAB - len(own))
    assert not hidden.grad[targets == IGNORE].any() and hidden.grad[targets != IGNORE].any(1).all()


def test_the_sum_of_the_softmax_is_right_on_average():
    hidden, weight, targets = (each[1:2] if n != 1 else each for n, each in enumerate(inputs()))
    torch.manual_seed(0)
    with torch.no_grad():
        exact = F.cross_entropy(hidden @ weight[:N_VOCAB].T, targets).exp()  # the sum, by the target's exponential
        sums = torch.stack([sampled_loss(hidden, weight, targets, N_VOCAB, 12) for _ in range(4000)]).exp()
    assert sums.std() > 0.1 * exact  # or the mean would say nothing
    assert abs(sums.mean() - exact) < 4 * sums.std() / math.sqrt(len(sums))


def test_its_products_are_in_autocast_s_dtype_and_its_loss_in_float32():
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = sampled_loss(hidden, weight, targets, N_VOCAB, N_VOCAB, IGNORE)
    loss.backward()
    exact = F.cross_entropy(hidden @ weight[:N_VOCAB].T, targets, ignore_index=IGNORE, reduction="sum")
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
