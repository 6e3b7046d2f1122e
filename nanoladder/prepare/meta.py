"""meta.json, the description of a prepared folder: reading it, and checking the files against it at every start.

A digest covers 256 blocks of a file, so it takes no longer for a large file. It detects a file that was truncated,
swapped or partly copied; a single wrong byte in 18 GB most likely goes unnoticed.

A folder made by nanoGPT has no meta.json. Its meta.pkl, if there is one, states the vocabulary.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from nanoladder import files
from nanoladder.errors import BadInput, reading
from nanoladder.tokenizer import meta_pkl
from nanoladder.tokenizer.existing import how_to_prepare

DATA_DIR = Path(__file__).resolve().parents[2] / "data"  # where a dataset is found by its name
FORMAT_VERSION = 4  # of a prepared folder
SPLITS = ("train", "val")
DTYPES = ("uint16", "uint32")  # of token ids
ENTRIES = {"tokenizer": str, "vocab_size": int, "dtype": str, "tokens": dict, "bytes": dict}
ENTRIES |= {"digests": dict, "documents": bool}  # that every meta.json has, with their types
BLOCKS, BLOCK = 256, 2**14  # a sample: blocks per file, bytes per block


def sample_blocks(path, itemsize=1):
    """Yields 256 evenly spaced blocks of 16 KiB, first and last included; all of a file up to 4 MiB.

    itemsize: bytes; each block begins at a multiple of it. Raises OSError, or ValueError unless the file is regular.
    """
    room = max(0, files.size(path) - BLOCK)
    step = max(BLOCK, room / (BLOCKS - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(BLOCKS):
            file.seek(int(number * step) // itemsize * itemsize)
            yield file.read(BLOCK)


def sample_digest(path: Path) -> str:
    """SHA-256 of sample_blocks."""
    digest = hashlib.sha256()
    for block in sample_blocks(path):
        digest.update(block)
    return digest.hexdigest()


def read_meta(folder: Path, vocab_size: int) -> dict:
    """Returns the entries of a folder's meta.json, with vocab_size replaced by the argument unless that is 0.

    For a folder made by nanoGPT, which has no meta.json: vocab_size, dtype and documents, and tokenizer if meta.pkl has
    it. Raises BadInput if the file is damaged or of another format, or the folder has more token ids than vocab_size.
    """
    meta = read_own(folder / "meta.json") if os.path.lexists(folder / "meta.json") else read_foreign(folder, vocab_size)
    n_ids = meta["vocab_size"]
    if vocab_size and vocab_size < n_ids:
        raise BadInput(
            f"vocab_size={vocab_size} is less than the {n_ids} token ids of {folder}; expected at least {n_ids}, or 0; "
            f"for a model that has this vocab_size, data prepared with its tokenizer: {how_to_prepare('MODEL')}, where "
            "MODEL is the model's folder, or hf:NAME"
        )
    return {**meta, "vocab_size": vocab_size or n_ids}


def read_foreign(folder, vocab_size):
    """Returns read_meta's entries for a folder made by nanoGPT, as meta.pkl states them or vocab_size implies."""
    stated = meta_pkl.read(folder) if meta_pkl.exists(folder) else {}
    n_ids = stated.get("vocab_size", vocab_size)
    if not n_ids:
        raise BadInput(
            f"{folder} has no meta.json; prepare it again, or, if nanoGPT wrote its files, give the number of token "
            "ids with --vocab_size=N (50257 for GPT-2's tokenizer)"
        )
    dtype = stated.get("dtype", DTYPES[n_ids > 2**16])
    if dtype not in DTYPES:
        raise BadInput(f"{folder / meta_pkl.FILE} states dtype={dtype!r:.40}; expected {' or '.join(DTYPES)}")
    tokenizer = {"tokenizer": "char"} if "itos" in stated else {}
    return {"vocab_size": n_ids, "dtype": dtype, "documents": False, **tokenizer}


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


def check(folder: Path, meta: dict, context_length: int) -> None:
    """Raises BadInput unless the folder's files match meta.json and each split has at least one window."""
    with reading(f"{folder} cannot be read", "prepare the dataset again"):
        for name, digest in meta.get("digests", {}).items():
            if sample_digest(folder / name) != digest:
                raise BadInput(f"{folder / name} is not the file that meta.json describes; prepare the dataset again")
        for name in SPLITS:
            check_tokens(folder / f"{name}.bin", meta, context_length)


def check_tokens(path, meta, context_length):
    """Raises BadInput unless a token file holds a window and, if nanoGPT wrote it, ids below vocab_size."""
    n_bytes, dtype = files.size(path), np.dtype(meta["dtype"])
    n_ids = n_bytes // dtype.itemsize
    if n_bytes % dtype.itemsize:
        raise BadInput(f"{path} has {n_bytes} bytes; expected whole {dtype} ids: it was cut, prepare the dataset again")
    if n_ids < context_length + 1 and not meta["documents"]:
        raise BadInput(
            f"{path} holds {n_ids} tokens, less than one window of context_length={context_length} and its "
            f"last target; expected at least {context_length + 1}: use more text or a shorter context"
        )
    if "digests" not in meta:
        ids = np.frombuffer(b"".join(sample_blocks(path, itemsize=8)), dtype)
        check_foreign(path, ids, meta["vocab_size"])


def check_foreign(path, ids, vocab_size):
    """Raises BadInput if ids, (n,) of a file that nanoGPT or another tool wrote, are too wide or too large."""
    for times in (4, 2):  # as wide as they are read: the higher parts of each id are read as ids near 0
        parts = ids.reshape(-1, times) if len(ids) % times == 0 else np.zeros((1, times))
        rare = np.count_nonzero(parts[:, 0]) < 32  # could all be first by chance
        if not rare and 256 * int(parts[:, 1:].max()) < int(parts[:, 0].max()):
            raise BadInput(
                f"{path} holds ids of {times * ids.itemsize} bytes: read as {ids.dtype}, all but 1 in {times} are near "
                "0; expected uint16, or uint32 with vocab_size above 65536 or 'dtype': 'uint32' in meta.pkl"
            )
    if (largest := int(ids.max())) >= vocab_size:
        if ids.itemsize == 2:
            advice = f"set --vocab_size={largest + 1} or more, or prepare the dataset again"
        else:
            advice = "if they are uint16, --vocab_size is their tokenizer's (50257 for GPT-2's)"
        raise BadInput(
            f"{path}, read as {ids.dtype}, holds token id {largest}, beyond vocab_size={vocab_size}; expected ids "
            f"below that: {advice}"
        )
