"""Tasks: the items of a file as rows of tokens, and the figures computed from their scores.

The context and an ending are joined by one space and encoded separately, the space with the ending; GPT-2's tokenizer
gives the same tokens for the whole text. Of several endings, the model chooses the one with the highest
log-probability given the context. It has to predict a last word greedily: each token must be the likeliest.
"""

import math
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from model import IGNORE
from nanoladder.errors import BadInput
from nanoladder.evaluation.items import read_items
from nanoladder.evaluation.score import Scorer, perplexity
from nanoladder.tokenizer.encoding import encode


class Task:
    """The items of a file as rows, one for each ending of each item: the context's tokens, then the ending's.

    A context is truncated on the left to fit the model's positions. Raises BadInput, which names the line, if the line
    is not an item, an ending alone is too long, or the tokenizer does not know a character.
    """

    def __init__(self, path: Path, tokenizer: Encoding, context_length: int) -> None:
        self.path, self.items = path, read_items(path)
        self.rows, n_targets, self.n_cut = [], [], 0  # n_cut: number of items whose context was truncated
        for item in self.items:
            try:
                context = encode(tokenizer, item.context)
                endings = [encode(tokenizer, f" {ending}") for ending in item.endings]
                room = context_length + 1 - max(map(len, endings))  # the last token is only a target
                if room < 1:
                    raise BadInput(
                        f"an ending of {context_length + 1 - room} tokens; expected at most context_length="
                        f"{context_length}: leave the item out, or take a model of a longer context"
                    )
            except BadInput as error:
                raise BadInput(f"{path} line {item.line}: {error}") from None
            self.n_cut += len(context) > room
            for ending in endings:
                self.rows.append(np.array((context + ending)[-context_length - 1 :]))
                n_targets.append(len(ending))
        self.lengths = np.array([len(row) - 1 for row in self.rows])  # number of inputs in each row
        self.n_targets = np.array(n_targets)

    def read(self, numbers):
        """Returns inputs and targets (B, T) of the rows with these indices; the targets are the endings' tokens."""
        inputs = np.zeros((len(numbers), self.lengths[numbers].max()), np.int64)
        targets = np.full_like(inputs, IGNORE)
        for i, number in enumerate(numbers):
            row, end, n = self.rows[number], self.lengths[number], self.n_targets[number]
            inputs[i, :end], targets[i, end - n : end] = row[:-1], row[-n:]
        return inputs, targets

    def evaluate(self, scorer: Scorer) -> dict:
        """Returns a dict of figures. Collective.

        accuracy: fraction of items that the model gets right, and its standard error; for choices also with
        log-probabilities per token and per byte of the ending. perplexity: for last words, per word; None if too large.
        """
        scores = scorer.score(self.path.name, self.lengths, self.read)
        judge = self.judge_choices if len(self.items[0].endings) > 1 else self.judge_words
        counts = {"items": len(self.items), "contexts_cut": self.n_cut}
        return {"file": str(self.path), **counts, **judge(scores)}

    def judge_choices(self, scores):
        ends = np.cumsum([len(item.endings) for item in self.items])
        n_bytes = [len(ending.encode()) for item in self.items for ending in item.endings]  # without the leading space
        figures = {}
        for name, sizes in {"": 1, "_per_token": self.n_targets, "_per_byte": n_bytes}.items():
            chosen = [log_probs.argmax() for log_probs in np.split(scores.log_probs / sizes, ends[:-1])]
            right = [number == item.label for number, item in zip(chosen, self.items, strict=True)]
            figures |= mean(f"accuracy{name}", right)
        return figures

    def judge_words(self, scores):
        nats = -math.fsum(scores.log_probs) / len(self.items)
        return {**mean("accuracy", scores.greedy), "perplexity": perplexity(nats)}


def mean(name, truths):
    """The mean of n booleans, and its standard error with n - 1 degrees of freedom."""
    n, share = len(truths), float(np.mean(truths))
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, n - 1))}
