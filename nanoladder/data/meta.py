"""meta.json, the description of a prepared folder: reading it, and checking the files against it at every start.

A digest covers 256 blocks of a file, so it takes no longer for a large file. It detects a file that was truncated,
swapped or partly copied; a single wrong byte in 18 GB most likely goes unnoticed.

A folder made by nanoGPT has no meta.json; if its tokens are characters, it has a meta.pkl.
"""

import hashlib
import json
import os

import numpy as np

from nanoladder import files
from nanoladder.data import meta_pkl
from nanoladder.errors import BadInput, reading

FORMAT_VERSION = 4  # of a prepared folder
SPLITS = ("train", "val")
ENTRIES = {"tokenizer": str, "vocab_size": int, "dtype": str, "tokens": dict, "bytes": dict}
ENTRIES |= {"digests": dict, "documents": bool}  # that every meta.json has, with their types
DTYPES = ("uint16", "uint32")  # of token ids
BLOCKS, BLOCK = 256, 2**14  # a sample: blocks per file, bytes per block
SAMPLED = 2**16  # ids read from a file whose vocabulary is unknown


def sample_digest(path):
    """SHA-256 of 256 evenly spaced blocks of 16 KiB, first and last included; of the whole file up to 4 MiB."""
    digest, room = hashlib.sha256(), max(0, path.stat().st_size - BLOCK)
    step = max(BLOCK, room / (BLOCKS - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(BLOCKS):
            file.seek(int(number * step))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def read_meta(folder, vocab_size):
    """Returns the entries of a folder's meta.json, with vocab_size replaced by the argument unless that is 0.

    For a folder made by nanoGPT, which has no meta.json: vocab_size, dtype and documents, and tokenizer if meta.pkl has
    it. Raises BadInput if the file is damaged or of another format, or the folder has more token ids than vocab_size.
    """
    foreign = {"dtype": "uint16", "documents": False}
    if os.path.lexists(folder / "meta.json"):
        meta = read_own(folder / "meta.json")
    elif meta_pkl.has_vocabulary(folder):
        meta = {**foreign, "vocab_size": meta_pkl.read_tokenizer(folder).n_vocab, "tokenizer": "char"}
    elif vocab_size:
        return {**foreign, "vocab_size": vocab_size}
    else:
        raise BadInput(
            f"{folder} has no meta.json; prepare it again, or, if nanoGPT wrote its uint16 files, give the number "
            "of token ids with --vocab_size=N (50257 for GPT-2's tokenizer)"
        )
    own = meta["vocab_size"]
    if vocab_size and vocab_size < own:
        raise BadInput(
            f"vocab_size={vocab_size} is less than the {own} token ids of {folder}; expected at least {own}, or 0; "
            "for a model that has this vocab_size, data prepared with its tokenizer"
        )
    return {**meta, "vocab_size": vocab_size or own}


def read_own(path):
    """Returns the entries of a meta.json. Raises BadInput unless writer.py wrote it in this format."""
    with reading(f"{path} is not the meta.json of a prepared dataset", "prepare it again, with --overwrite"):
        meta = json.loads(files.read(path))
        if meta["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {meta['format_version']!r:.40}, expected {FORMAT_VERSION}")
        if files.seal(meta) != meta:
            raise BadInput(
                f"{path} was changed: its sha256 is not that of its entries; undo the change, or prepare the dataset "
                "again, with --overwrite"
            )
        for key, kind in ENTRIES.items():
            if type(meta[key]) is not kind:
                raise TypeError(f"{key}={meta[key]!r:.40}, expected {kind.__name__}")
        if meta["dtype"] not in DTYPES:
            raise ValueError(f"dtype={meta['dtype']:.40}, expected {' or '.join(DTYPES)}")
        return meta


def check(folder, meta, context_length):
    """Raises BadInput unless the folder's files match meta.json and each split has at least one window."""
    with reading(f"{folder} cannot be read", "prepare the dataset again"):
        for name, digest in meta.get("digests", {}).items():
            if sample_digest(folder / name) != digest:
                raise BadInput(f"{folder / name} is not the file that meta.json describes; prepare the dataset again")
        for name in SPLITS:
            check_tokens(folder / f"{name}.bin", meta, context_length)


def check_tokens(path, meta, context_length):
    """Raises BadInput unless a token file holds a window and, if nanoGPT wrote it, ids below vocab_size."""
    ids = np.memmap(path, meta["dtype"], mode="r")
    if len(ids) < context_length + 1 and not meta["documents"]:
        raise BadInput(
            f"{path} holds {len(ids)} tokens, less than one window of context_length={context_length} and its "
            f"last target; expected at least {context_length + 1}: use more text or a shorter context"
        )
    if "digests" not in meta and (largest := int(ids[:: len(ids) // SAMPLED + 1].max())) >= meta["vocab_size"]:
        raise BadInput(
            f"{path} holds token id {largest}, beyond vocab_size={meta['vocab_size']}; expected ids below it: set "
            f"--vocab_size={largest + 1} or more, or prepare the dataset again"
        )
