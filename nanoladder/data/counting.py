"""Counting: losses of predictions by counts, with nothing learned, on a dataset's validation windows.

Unigrams, bigrams and trigrams are counted in the training split. Bigrams and trigrams are interpolated by absolute
discounting: every count loses DISCOUNT, which goes to a shorter context, where an n-gram counts once for each different
token before it (Kneser & Ney 1995; Chen & Goodman 1999). Copies: of the places earlier in the window that follow the
same tokens, the part that the target follows. Nothing is fitted. A model that is no better has learned nothing that a
table does not know.
"""

import contextlib
import json
from typing import NamedTuple

import numpy as np

from model import IGNORE
from nanoladder import files
from nanoladder.config import Config
from nanoladder.data.batches import ValidationBatches
from nanoladder.data.datasets import Dataset

SAMPLE, BLOCK = 2**24, 2**16  # tokens that are counted at most; a larger split is sampled in blocks
DISCOUNT = 0.75
COPIES = {1: 0.2, 2: 0.4, 4: 0.8}  # tokens that match: probability of copying the token after them
MOST_IDS = 2**21  # a trigram of more token ids has no number below 2^63
NAMES = ("unigrams", "bigrams", "trigrams", "trigrams and copies")


def counted_losses(dataset: Dataset, config: Config) -> dict[str, float]:
    """Returns {name: loss}, in nats per token, on the windows of the validation loss; {} for more than MOST_IDS ids.

    They are kept in the dataset's folder, if it can be written, and counted again if the data change.
    """
    if dataset.vocab_size > MOST_IDS:
        return {}
    windows = ValidationBatches(dataset.val, config).chosen
    path = dataset.folder / f"counting_{len(windows)}x{config.context_length}.json"
    with contextlib.suppress(Exception):  # no file, or a damaged one
        kept = json.loads(files.read(path))
        if kept["data"] == dataset.fingerprint():
            return {name: float(kept["losses"][name]) for name in NAMES}
    losses = count(dataset, *dataset.val.read(windows))
    with contextlib.suppress(OSError):
        files.write(path, json.dumps({"data": dataset.fingerprint(), "losses": losses}, indent=2) + "\n")
    return losses


def count(dataset: Dataset, inputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Returns {name: loss}, in nats per token, on windows; {} for more than MOST_IDS ids. inputs, targets: (n, T)."""
    if dataset.vocab_size > MOST_IDS:
        return {}
    probabilities = Counts(sample(dataset.train), dataset.vocab_size).probabilities(inputs, targets)
    return {name: float(-np.log(probabilities[name][targets != IGNORE]).mean()) for name in NAMES}


class Counts:
    """Unigrams, bigrams and trigrams in rows (n, m) of token ids below V.

    A number stands for an n-gram: (u · V + v) · V + w.
    """

    def __init__(self, rows, vocab_size):
        self.vocab_size = V = vocab_size
        rows = rows.astype(np.int64)
        bigrams = rows[:, :-1] * V + rows[:, 1:]
        trigrams = (bigrams[:, :-1] * V + rows[:, 2:]).ravel()
        self.unigrams = np.bincount(rows.ravel(), minlength=V)  # (V,)
        self.bigrams, self.trigrams = tabulate(bigrams.ravel(), V), tabulate(trigrams, V)
        # What an n-gram counts as the shorter part of a longer one: different tokens before it.
        self.short_unigrams = np.bincount(self.bigrams.ngrams % V, minlength=V)
        self.short_bigrams = tabulate(self.trigrams.ngrams % V**2, V)

    def probabilities(self, inputs, targets):
        """Returns {name: probabilities of the targets, (n, T)}. inputs, targets: int64 (n, T) of n windows.

        A target of IGNORE has a meaningless probability.
        """
        targets = np.maximum(targets, 0)
        pairs = inputs[:, :-1] * self.vocab_size + inputs[:, 1:]  # the contexts of trigrams
        unigrams, shortest = (smoothed(counts)[targets] for counts in (self.unigrams, self.short_unigrams))
        bigrams = self.bigrams.interpolate(inputs, targets, shortest)
        shorter = self.short_bigrams.interpolate(inputs, targets, shortest)[:, 1:]
        trigrams = bigrams.copy()  # a window's first token has no pair before it
        trigrams[:, 1:] = self.trigrams.interpolate(pairs, targets[:, 1:], shorter)
        copied = np.stack([copy(*rows) for rows in zip(inputs, targets, trigrams, strict=True)])
        return dict(zip(NAMES, (unigrams, bigrams, trigrams, copied), strict=True))


class Table(NamedTuple):
    """Counts of n-grams by number, and of their contexts, which are n-grams without their last token."""

    vocab_size: int
    ngrams: np.ndarray  # (n,) sorted
    counts: np.ndarray  # (n,)
    contexts: np.ndarray  # (m,) sorted
    totals: np.ndarray  # (m,) sum of the counts of a context's n-grams
    kinds: np.ndarray  # (m,) number of a context's n-grams

    def interpolate(self, contexts, targets, shorter):
        """Probabilities of the targets in these contexts. shorter: those in contexts a token shorter."""
        counts = look_up(self.ngrams, self.counts, contexts * self.vocab_size + targets)
        totals, kinds = (look_up(self.contexts, values, contexts) for values in (self.totals, self.kinds))
        seen = (np.maximum(counts - DISCOUNT, 0) + DISCOUNT * kinds * shorter) / np.maximum(totals, 1)
        return np.where(totals > 0, seen, shorter)


def tabulate(ngrams, vocab_size):
    """Returns the Table of n-grams (N,)."""
    ngrams, counts = np.unique(ngrams, return_counts=True)
    contexts, kinds = np.unique(ngrams // vocab_size, return_counts=True)
    return Table(vocab_size, ngrams, counts, contexts, np.add.reduceat(counts, np.cumsum(kinds) - kinds), kinds)


def look_up(keys, values, wanted):
    """Returns the values of the wanted keys, 0 for missing ones. keys: sorted."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def smoothed(counts):
    """Counts (V,) as probabilities, with half a count more for each token."""
    return (counts + 0.5) / (counts.sum() + 0.5 * len(counts))


def copy(inputs, targets, probabilities):
    """Mixes copies from earlier in a window into the probabilities of its targets, all (T,). Longer matches go last."""
    T = len(inputs)
    match = np.tril(inputs[:, None] == inputs, -1)  # (T, T): position i matches position j < i
    followed = targets[:, None] == np.append(inputs[1:], -1)  # the token after j is the target at i
    longest, longer = 1, match
    for length, share in COPIES.items():
        for _ in range(length - longest):  # a match is a token longer if the positions before match as well
            longer = match & np.pad(longer, ((1, 0), (1, 0)))[:T, :T]
        longest = length
        n_matches = np.count_nonzero(longer, axis=1)
        copied = np.count_nonzero(longer & followed, axis=1) / np.maximum(n_matches, 1)
        probabilities = np.where(n_matches > 0, (1 - share) * probabilities + share * copied, probabilities)
    return probabilities


def sample(split):
    """A split's tokens as rows (n, m): all of them as one row, or SAMPLE of them in evenly spaced blocks."""
    tokens = split.tokens
    if len(tokens) <= SAMPLE:
        return tokens[None]
    starts = np.linspace(0, len(tokens) - BLOCK, SAMPLE // BLOCK).astype(np.int64)
    blocks = []
    with open(split.path, "rb", buffering=0) as file:  # through the mapping, a page may bring megabytes of neighbors
        for start in starts.tolist():
            file.seek(start * tokens.itemsize)
            blocks.append(np.frombuffer(file.read(BLOCK * tokens.itemsize), tokens.dtype))
    return np.stack(blocks)
