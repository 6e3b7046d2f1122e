"""Data: prepared datasets, their validation, and batches.

writer.py writes a prepared folder; every data/*/prepare.py calls it. A corpus of documents (corpus.py), which
sources.py reads from text files, records.py from JSON lines, Parquet files or the Hugging Face hub, passes through
encode.py into the token files of resume.py. tokenizer.py builds, saves and loads tokenizers,
huggingface_tokenizer.py converts them from and to Hugging Face's format, existing_tokenizer.py finds that of a run, a
dataset or a model, also on the hub (hub.py). meta.py reads meta.json and checks a folder against it, meta_pkl.py reads
nanoGPT's meta.pkl, datasets.py opens the folder, batches.py cuts batches, counting.py counts n-grams. Not here: the
choice of texts (data/*/prepare.py) and moving batches to a device (train.py).
"""

from nanoladder.data.batches import (
    WORKERS,
    Batch,
    TrainingBatches,
    ValidationBatches,
    full_shared_memory,
    prefetch,
)
from nanoladder.data.datasets import open_dataset
