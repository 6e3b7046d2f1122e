"""Checks of a prepared folder, at every start: the files are those that meta.json describes.

Their sizes are compared, and digests of a sample: 256 blocks, so that they take no longer for a large file. A file that
was cut off, swapped or copied in part is found; a single wrong byte in 18 GB most likely is not.
"""

import numpy as np

from nanoladder.data.meta import SPLITS, sample_digest
from nanoladder.errors import BadInput

SAMPLED = 2**16  # ids of a file whose vocabulary is not known


def check(folder, meta, context_length):
    """Raises BadInput unless the folder's files are those that meta.json describes, with a window for each split."""
    try:
        for name in SPLITS:
            check_tokens(folder / f"{name}.bin", meta, context_length)
        for name, digest in meta.get("digests", {}).items():
            require_file(folder / name)
            if sample_digest(folder / name) != digest:
                raise BadInput(f"{folder / name} is not the file that meta.json describes; prepare the dataset again")
    except OSError as error:
        raise BadInput(f"{folder} cannot be read ({error}); prepare the dataset again") from None


def check_tokens(path, meta, context_length):
    """Raises BadInput unless a token file is of the expected size, enough for one window, and of the vocabulary."""
    require_file(path)
    n_tokens, left_over = divmod(path.stat().st_size, np.dtype(meta["dtype"]).itemsize)
    expected = meta["tokens"][path.stem] if "tokens" in meta else n_tokens
    if left_over or n_tokens != expected:
        raise BadInput(
            f"{path} is truncated or foreign: {path.stat().st_size} bytes; expected {expected} tokens of "
            f"{meta['dtype']}; prepare the dataset again"
        )
    if n_tokens < context_length + 1 and not meta["documents"]:
        raise BadInput(
            f"{path} holds {n_tokens} tokens, less than one window of context_length={context_length} and its "
            f"last target; expected at least {context_length + 1}: use more text or a shorter context"
        )
    if "digests" not in meta:  # nanoGPT wrote it
        largest = int(np.memmap(path, meta["dtype"], mode="r")[:: n_tokens // SAMPLED + 1].max())
        if largest >= meta["vocab_size"]:
            raise BadInput(
                f"{path} holds token id {largest}, beyond vocab_size={meta['vocab_size']}; expected ids below it: set "
                f"--vocab_size={largest + 1} or more, or prepare the dataset again"
            )


def require_file(path):
    if not path.is_file():
        raise BadInput(f"{path} is missing or no ordinary file; prepare the dataset again")
