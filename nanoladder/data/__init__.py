"""Data: prepared datasets, their validation, and batches.

writer.py writes a prepared folder and is called by every data/*/prepare.py. A corpus.py of documents, which sources.py
reads from files or the Hugging Face hub, passes through encode.py into the token files of unfinished.py. tokenizer.py
handles the tokenizer, huggingface_tokenizer.py that of others. meta.py reads meta.json and checks a folder against it,
meta_pkl.py reads a meta.pkl of nanoGPT's, datasets.py opens the folder, batches.py cuts batches. Not here: which texts
(data/*/prepare.py) and moving batches to a device (train.py).
"""

from nanoladder.data.batches import WORKERS, Batch, TrainingBatches, ValidationBatches, prefetch
from nanoladder.data.datasets import open_dataset
