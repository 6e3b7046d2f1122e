"""Counted predictions are distributions, equal their definition, and are kept as long as the data are the same."""

from collections import Counter

import numpy as np
import pytest
from conftest import replace, tiny, write_folder

from nanoladder.data import batches, counting, open_dataset
from nanoladder.data.counting import COPIES, DISCOUNT, NAMES, Counts, counted_losses

V, T = 5, 12
TOKENS = np.random.default_rng(0).choice(V, 300, p=[0.4, 0.3, 0.2, 0.1, 0.0]).astype(np.uint16)  # 4 is never seen
WINDOWS = np.random.default_rng(1).integers(V, size=(4, T + 1))
INPUTS, TARGETS = WINDOWS[:, :-1], WINDOWS[:, 1:]


@pytest.fixture(scope="module")
def counts():
    return Counts(TOKENS[None], V)


def test_each_prediction_sums_to_one(counts):
    each = [counts.probabilities(INPUTS, np.full_like(TARGETS, token)) for token in range(V)]
    for name in NAMES:
        of_token = np.stack([probabilities[name] for probabilities in each])
        assert (of_token > 0).all()
        assert of_token.sum(0) == pytest.approx(np.ones_like(INPUTS, float))


def expected(order, context, target, shorter=False):
    """A probability by its definition. shorter: n-grams count once for each different token before them."""
    ngrams = Counter(zip(*(TOKENS[i : len(TOKENS) - order + 1 + i].tolist() for i in range(order)), strict=True))
    if shorter:
        longer = {tuple(TOKENS[i : i + order + 1].tolist()) for i in range(len(TOKENS) - order)}
        ngrams = Counter(ngram[1:] for ngram in longer)
    if order == 1:
        return (ngrams[(target,)] + 0.5) / (ngrams.total() + 0.5 * V)
    after = {ngram[-1]: count for ngram, count in ngrams.items() if ngram[:-1] == context[1 - order :]}
    if not after:
        return expected(order - 1, context, target, shorter=True)
    rest = DISCOUNT * len(after) * expected(order - 1, context, target, shorter=True)
    return (max(after.get(target, 0) - DISCOUNT, 0) + rest) / sum(after.values())


def copied(window, i, target, probability):
    for length, share in COPIES.items():
        if i + 1 < length:
            break
        last = window[i + 1 - length : i + 1]
        following = [window[j + 1] for j in range(length - 1, i) if window[j + 1 - length : j + 1] == last]
        if following:
            probability = (1 - share) * probability + share * following.count(target) / len(following)
    return probability


def test_predictions_equal_their_definition(counts):
    found = counts.probabilities(INPUTS, TARGETS)
    assert tuple(found) == NAMES
    for row, window in enumerate(INPUTS.tolist()):
        for i in range(T):
            target, context = int(TARGETS[row, i]), tuple(window[: i + 1])
            trigram = expected(min(3, i + 2), context, target)
            values = [expected(1, context, target), expected(2, context, target), trigram]
            values.append(copied(window, i, target, trigram))
            assert [found[name][row, i] for name in NAMES] == pytest.approx(values)


def test_losses_are_those_of_the_validation_windows_and_of_valid_targets(documents):
    config = tiny(dataset=str(documents), eval_windows=3)
    dataset = open_dataset(config)
    all_counts = Counts(dataset.train.tokens[None], dataset.vocab_size)
    losses, n_tokens = dict.fromkeys(NAMES, 0.0), 0
    for batch in batches.ValidationBatches(dataset.val, config):
        valid = (batch.targets != batches.IGNORE).numpy()
        for name, p in all_counts.probabilities(batch.inputs.numpy(), batch.targets.numpy()).items():
            losses[name] -= np.log(p[valid]).sum()
        n_tokens += valid.sum()
    assert counted_losses(dataset, config) == pytest.approx({name: loss / n_tokens for name, loss in losses.items()})


def test_losses_are_kept_with_the_data_and_counted_again_for_others(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "data", TOKENS.tolist(), TOKENS.tolist()[:200], V)
    config = tiny(dataset=str(folder), context_length=T, eval_windows=0)
    first = counted_losses(open_dataset(config), config)
    assert tuple(first) == NAMES
    one = counted_losses(open_dataset(config), replace(config, eval_windows=1))
    with monkeypatch.context() as patched:
        patched.setattr(counting, "Counts", None)  # not called
        assert counted_losses(open_dataset(config), config) == first
        assert counted_losses(open_dataset(config), replace(config, eval_windows=1)) == one != first
    next(folder.glob("counting_*x12.json")).write_text("damaged")
    assert counted_losses(open_dataset(config), config) == first
    write_folder(folder, TOKENS.tolist()[::-1], TOKENS.tolist()[:200], V)
    assert counted_losses(open_dataset(config), config) != first


def test_a_large_split_is_sampled_in_blocks_which_alone_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "SAMPLE", 40)
    monkeypatch.setattr(counting, "BLOCK", 10)
    folder = write_folder(tmp_path, range(101), range(40), 101)
    split = open_dataset(tiny(dataset=str(folder), context_length=T)).train
    split.tokens = np.zeros_like(split.tokens)  # in place of the mapping, which brings neighbors from the disk
    rows = counting.sample(split)
    assert rows[:, 0].tolist() == [0, 30, 60, 91] and (rows == rows[:, :1] + np.arange(10)).all()
    split.tokens = np.arange(40)
    assert counting.sample(split).tolist() == [list(range(40))]


def test_ids_too_large_for_the_number_of_a_trigram_are_not_counted(dense, monkeypatch):
    monkeypatch.setattr(counting, "MOST_IDS", 2)
    config = tiny(dataset=str(dense))
    assert counted_losses(open_dataset(config), config) == {}
