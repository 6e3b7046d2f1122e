"""Rows are scored in batches with little padding; the scores do not depend on the batches."""

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from model import GPT, IGNORE
from nanoladder.errors import BadInput
from nanoladder.evaluation import Scorer, score

CPU = torch.device("cpu")


def padding(batches, lengths):
    computed = sum(len(rows) * lengths[rows].max() for rows in batches)
    return 1 - lengths.sum() / computed


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 200))
def test_each_row_is_in_one_batch_within_its_limit_of_tokens(lengths, batch_tokens):
    lengths = np.array(lengths)
    batches = score.schedule(lengths, batch_tokens)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= batch_tokens for rows in batches)
    assert all(lengths[rows[0]] == lengths[rows].max() for rows in batches)
    assert padding(batches, lengths) <= 0.2


def rows_of(lengths, n_targets):
    """Rows, some of which repeat one token, and a function that reads them; each one's last n_targets are predicted."""
    rows = np.random.default_rng(0).integers(0, 5, (len(lengths), 17))
    rows[::3] = rows[::3, :1]

    def read(numbers):
        inputs, targets = rows[numbers, :-1].copy(), rows[numbers, 1:].copy()
        place, length = np.arange(16), lengths[numbers, None]
        targets[(place >= length) | (place < length - n_targets[numbers, None])] = IGNORE
        return inputs, targets

    return rows, read


def test_batched_scores_equal_those_of_each_row_alone(monkeypatch):
    """With a padded vocabulary, whose logits are computed three positions at a time."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 17, 60)
    n_targets = rng.integers(1, lengths + 1)
    rows, read = rows_of(lengths, n_targets)
    model = GPT(tiny(vocab_size=5, pad_vocab_to=64)).eval()
    log_probs, greedy = [], []
    for row, length, n in zip(rows, lengths, n_targets, strict=True):
        with torch.no_grad():
            logits = model.logits(torch.from_numpy(row[None, :length]))[0, -n:].double()
        targets = torch.from_numpy(row[length + 1 - n : length + 1])
        log_probs.append(float(logits.log_softmax(1)[range(n), targets].sum()))
        greedy.append(torch.equal(logits.argmax(1), targets))
    monkeypatch.setattr(score, "LOGITS", 3 * 64)
    scores = Scorer(model, "float32", CPU, batch_tokens=70).score("rows", lengths, read)
    assert scores.log_probs == pytest.approx(log_probs, abs=1e-4)
    assert scores.greedy.tolist() == greedy and any(greedy) and not all(greedy)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_in_half_precision_are_close(dtype):
    """In float16, too, whose loss is scaled in training: here there is nothing to scale."""
    lengths = np.full(3, 16)
    read = rows_of(lengths, lengths)[1]
    found = [Scorer(GPT(tiny(vocab_size=5)), name, CPU, 70).score("rows", lengths, read) for name in ("float32", dtype)]
    exact, half = (scores.log_probs for scores in found)
    assert half == pytest.approx(exact, abs=0.1) and not np.array_equal(half, exact)


def test_a_broken_model_is_refused():
    lengths = np.full(2, 16)
    model = GPT(tiny(vocab_size=5))
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(BadInput, match="not finite"):
        Scorer(model, "float32", CPU, 70).score("x", lengths, rows_of(lengths, lengths)[1])
