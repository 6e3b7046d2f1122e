"""Corpora on the Hugging Face hub, streamed: nothing but the tokens is stored."""

import contextlib
import importlib.util

from nanoladder.data.corpus import HEAD, Corpus, describe_validation, find_threshold, sha256_of
from nanoladder.data.sources import text_of
from nanoladder.errors import BadInput


class Hub(Corpus):
    """The documents of a dataset that the package `datasets` streams, from the hub or from local files.

    arguments: dict, those of load_dataset, such as {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}.
    field: the column that holds the text. head: as in find_threshold.
    """

    def __init__(self, arguments, field="text", val_fraction=0.001, head=HEAD):
        if not importlib.util.find_spec("datasets"):
            raise BadInput(f"{arguments['path']}: needs the package datasets; install it (pip install datasets)")
        self.arguments, self.field, self.number, self.stream = arguments, field, 0, None
        digests = ((sha256_of(text), len(text.encode())) for text in self.texts(self.load()))
        self.threshold = find_threshold(digests, val_fraction, head)
        self.validation = describe_validation(val_fraction)
        self.identity = [arguments, field, self.threshold]

    def load(self):
        from datasets import load_dataset
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it tells every retry; a failure is one line here
        with self.reaching():
            return load_dataset(**self.arguments, split="train", streaming=True)

    def documents(self, place):
        self.stream = self.load()
        state, self.number, self.bytes_read = place or (None, 0, 0)
        if state:
            self.stream.load_state_dict(state)
        for text in self.texts(self.stream):
            split = "val" if (sha256_of(text), self.number) < tuple(self.threshold) else "train"
            self.number += 1
            self.bytes_read += len(text.encode())
            yield split, [text]

    def texts(self, stream):
        """Yields the text of each document that has one."""
        with self.reaching():
            for record in stream:
                text = text_of(record, self.field, f"{self.arguments['path']}, after document {self.number}")
                if text.strip():
                    yield text

    def position(self):
        """As in Corpus, but None within a document: only between two of them the stream says how to go on."""
        return None if self.n_pieces else [[self.stream.state_dict(), self.number, self.bytes_read], 0]

    @contextlib.contextmanager
    def reaching(self):
        """Raises BadInput for whatever goes wrong with the stream, which has many layers."""
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise BadInput(
                f"{self.arguments['path']} cannot be streamed from the Hugging Face hub ({reason:.300}); check the "
                "network and give the same command again: what is encoded is kept"
            ) from None
