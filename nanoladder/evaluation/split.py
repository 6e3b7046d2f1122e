"""The loss over a whole split: every target once, whatever the context length."""

import math

import numpy as np

from model import IGNORE
from nanoladder.data.counting import count
from nanoladder.data.datasets import Dataset
from nanoladder.errors import BadInput
from nanoladder.evaluation.score import Scorer, perplexity

COUNTED = 2**19  # targets that counting predicts at most; it takes seconds


class WholeSplit:
    """A dataset split as rows that predict each target once.

    Documents are cut as for training. A stream is cut into windows that begin every `stride` tokens (0: every
    context_length); the last window ends with the last token. A target in several windows counts only in the first.

    Raises BadInput unless stride is 0 to context_length, and 0 for documents.
    """

    def __init__(self, dataset: Dataset, name: str, stride: int = 0) -> None:
        self.split, T = (split := getattr(dataset, name)), split.context_length
        self.name, self.n_bytes = name, dataset.meta.get("bytes", {}).get(name)
        if stride and split.documents:
            raise BadInput(
                f"stride={stride}: the documents of {dataset.folder} are read one by one; expected no stride"
            )
        if not 0 <= stride <= T:
            raise BadInput(f"stride={stride}: expected 1 to context_length={T}")
        if split.documents:
            self.lengths = np.minimum(split.cut(np.arange(split.n_windows))[1], T)
        else:
            ends = np.append(np.arange(T, split.n_targets, stride or T), split.n_targets)
            self.starts, self.lengths = ends - T, np.full(len(ends), T)
            self.counted = T - np.diff(ends, prepend=0)  # targets of each window that earlier windows have counted

    def read(self, numbers):
        """Returns inputs and targets (B, T) of the windows with these indices."""
        if self.split.documents:
            return self.split.read(numbers)
        windows, phases = np.divmod(self.starts[numbers], self.split.context_length)
        inputs, targets = self.split.read(windows, phases)
        targets[np.arange(targets.shape[1]) < self.counted[numbers, None]] = IGNORE
        return inputs, targets

    def evaluate(self, scorer: Scorer) -> dict:
        """Returns a dict: loss, the mean in nats per token, and figures derived from it. Collective.

        perplexity: None if too large. bits_per_byte: of the split's text, if the dataset records its size.
        """
        scores = scorer.score(self.name, self.lengths, self.read)
        nats = -math.fsum(scores.log_probs)
        loss = nats / self.split.n_targets
        bits = {"bits_per_byte": nats / math.log(2) / self.n_bytes} if self.n_bytes else {}
        return {"targets": self.split.n_targets, "loss": loss, "perplexity": perplexity(loss), **bits}

    @property
    def every_counted(self) -> int:
        """Of how many windows counting predicts one."""
        return -(-self.split.n_targets // COUNTED)

    def count(self, dataset: Dataset) -> dict[str, float]:
        """Returns {name: loss} of predictions by counts of the training split, in nats per token, on these windows.

        Of a large split, on evenly spaced ones. dataset: the split's.
        """
        return count(dataset, *self.read(np.arange(0, len(self.lengths), self.every_counted)))
