"""The data room: prepared datasets, opened and checked, and the batches that are cut from them.

Here: writing a prepared folder (writer.py, which every data/*/prepare.py calls), its tokenizer (tokenizer.py), reading
its meta.json (meta.py), opening it (datasets.py) and cutting batches (batches.py). Not here: where texts come from
(data/*/prepare.py) and moving batches to a device (train.py).
"""

from nanoladder.data.batches import WORKERS, Batch, TrainingBatches, ValidationBatches, one_ahead, tokens_seen
from nanoladder.data.datasets import Dataset, Split, find_folder, open_dataset
from nanoladder.data.meta import read_meta

__all__ = [
    "WORKERS",
    "Batch",
    "Dataset",
    "Split",
    "TrainingBatches",
    "ValidationBatches",
    "find_folder",
    "one_ahead",
    "open_dataset",
    "read_meta",
    "tokens_seen",
]
