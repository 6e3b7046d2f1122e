"""Data: prepared folders opened, and their batches.

datasets.py opens a folder, batches.py cuts batches from its tokens, counting.py counts its n-grams. Not here: writing
and checking a folder (nanoladder/prepare), its tokenizer (nanoladder/tokenizer), moving batches to a device (train.py).
"""

from nanoladder.data.batches import (
    WORKERS,
    Batch,
    TrainingBatches,
    ValidationBatches,
    count_workers,
    full_shared_memory,
    prefetch,
)
from nanoladder.data.datasets import Dataset, Split, open_dataset
