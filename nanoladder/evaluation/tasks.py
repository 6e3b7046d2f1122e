"""Tasks: the items of a file as rows of tokens, and the figures that follow from their scores.

The context and an ending are joined by one space and encoded apart, the space with the ending; in GPT-2's tokenizer
these are the tokens of the whole text. Of several endings, the model chooses the one of the highest log-probability
given the context. A last word it has to predict greedily: each token the likeliest.
"""

import math

import numpy as np

from model import IGNORE
from nanoladder.data.tokenizer import encode
from nanoladder.errors import BadInput
from nanoladder.evaluation.score import perplexity


class Task:
    """The items of a file as rows, one for each ending of each item: the context's tokens, then the ending's.

    A context is cut from the left to as many tokens as the model has positions for. Raises BadInput, which names the
    line, if an ending alone is too long, or if the tokenizer does not know a character.
    """

    def __init__(self, path, items, tokenizer, context_length):
        self.path, self.items = path, items
        self.rows, n_targets, self.n_cut = [], [], 0  # n_cut: items whose context was cut
        for item in items:
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
        self.lengths = np.array([len(row) - 1 for row in self.rows])  # of their inputs
        self.n_targets = np.array(n_targets)

    def read(self, numbers):
        """Inputs and targets (B, T) of the rows of these numbers; the targets are the endings' tokens."""
        inputs = np.zeros((len(numbers), self.lengths[numbers].max()), np.int64)
        targets = np.full_like(inputs, IGNORE)
        for i, number in enumerate(numbers):
            row, end, n = self.rows[number], self.lengths[number], self.n_targets[number]
            inputs[i, :end], targets[i, end - n : end] = row[:-1], row[-n:]
        return inputs, targets

    def evaluate(self, scorer):
        """Returns a dict of figures, with the scores of each item under "details". Collective.

        accuracy: share of the items for which the model is right, and its standard error; of choices also with
        log-probabilities per token and per byte of the ending. perplexity: of last words, per word; None if too large.
        """
        scores = scorer.score(self.path.name, self.lengths, self.read)
        judge = self.judge_choices if len(self.items[0].endings) > 1 else self.judge_words
        counts = {"items": len(self.items), "contexts_cut": self.n_cut}
        return {"file": str(self.path), **counts, **judge(scores)}

    def judge_choices(self, scores):
        details, first = [], 0
        for item in self.items:
            own = slice(first, first := first + len(item.endings))
            log_probs, n_tokens = scores.log_probs[own], self.n_targets[own]
            n_bytes = [len(ending.encode()) for ending in item.endings]  # the space before it is not counted
            details.append(
                {
                    "line": item.line,
                    "label": item.label,
                    "log_probs": log_probs.tolist(),
                    "tokens": n_tokens.tolist(),
                    "bytes": n_bytes,
                    "chosen": int(log_probs.argmax()),
                    "chosen_per_token": int((log_probs / n_tokens).argmax()),
                    "chosen_per_byte": int((log_probs / n_bytes).argmax()),
                }
            )
        found = {}
        for way in ("", "_per_token", "_per_byte"):
            found |= mean(f"accuracy{way}", [item[f"chosen{way}"] == item["label"] for item in details])
        return {**found, "details": details}

    def judge_words(self, scores):
        details = [
            {"line": item.line, "word": item.endings[0], "log_prob": float(log_prob), "right": bool(greedy)}
            for item, log_prob, greedy in zip(self.items, scores.log_probs, scores.greedy, strict=True)
        ]
        nats = -math.fsum(scores.log_probs) / len(details)
        right = mean("accuracy", [item["right"] for item in details])
        return {**right, "perplexity": perplexity(nats), "details": details}


def mean(name, truths):
    """The mean of n truths, and its standard error with n - 1 degrees of freedom."""
    n, share = len(truths), sum(truths) / len(truths)
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, n - 1))}
