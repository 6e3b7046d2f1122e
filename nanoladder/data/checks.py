"""Checks of a prepared folder, which may come from anywhere.

Sizes, indexes and the tokenizer are checked at every start. The token files are read whole only once, for their SHA-256
and their largest id: 1 GB/s on a core with SHA instructions, 0.35 without, from the page cache. The result is kept in
.verified.json beside them and holds while a file's size, its modification time, its change time (which no copy keeps)
and a sample of its contents stay the same.

The sample cannot see everything. A failing disk changes neither size nor times, and its damage is found only if it
touches a sampled block: always if it is longer than a 255th of the file, but a single wrong byte in 18 GB with a
probability of 0.02 %. `--verify_data=True` reads everything again. Of several processes the first one reads for all; a
copy on another machine is compared with its sample (Dataset.fingerprint).
"""

import contextlib
import hashlib
import json
import os
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from nanoladder import files, parallel
from nanoladder.data.meta import SPLITS, token_files
from nanoladder.errors import BadInput

TOKENIZER = ("tokenizer.json", "tokenizer.tiktoken")
VERIFIED = ".verified.json"
BLOCKS, BLOCK = 256, 2**14  # a sample: blocks of a file, and bytes of a block


class Facts(NamedTuple):
    """Result of a full check of a token file: first its identity, then what reading it showed."""

    size: int
    modified_ns: int
    changed_ns: int
    sample: str
    dtype: str
    sha256: str
    largest_id: int


def check(folder, meta, context_length, verify_data):
    """Raises BadInput unless the folder's files are those that meta.json describes, with a window for each split.

    verify_data: read the token files whole even if that was done before. Of several processes the first one does it.
    """
    # On another machine the files are others: what one process finds wrong, all of them raise.
    for problem in parallel.gather_objects(refusal(check_small_files, folder, meta, context_length)):
        if problem:
            raise BadInput(problem)
    if problem := parallel.broadcast_from_first(lambda: refusal(verify, folder, meta, verify_data)):
        raise BadInput(problem)


def refusal(check, *arguments):
    """The message of the BadInput that a check raises, or None."""
    try:
        check(*arguments)
    except BadInput as error:
        return str(error)


def check_small_files(folder, meta, context_length):
    """Raises BadInput unless the sizes, the indices and the tokenizer fit meta.json: what every process looks at."""
    for name in SPLITS:
        check_sizes(folder, name, meta, context_length)
    for path in (folder / name for name in TOKENIZER):  # the run copies them
        if os.path.lexists(path) or path.name in meta.get("sha256", {}):
            check_digest(path, hashlib.sha256(contents(path)).hexdigest(), meta)


def check_sizes(folder, name, meta, context_length):
    """Raises BadInput unless a split's files are of the expected sizes, enough for one window, and its index fits."""
    n_tokens = 0
    for path, promised in files_of(folder, name, meta).items():
        if not path.is_file():
            raise BadInput(f"{path} is missing or no ordinary file; prepare the dataset again")
        found, left_over = divmod(path.stat().st_size, np.dtype(meta["dtype"]).itemsize)
        if left_over or found != (found if promised is None else promised):
            raise BadInput(
                f"{path} is truncated or foreign: {path.stat().st_size} bytes; expected {promised} tokens of "
                f"{meta['dtype']}; prepare the dataset again"
            )
        n_tokens += found
    if meta["documents"]:
        check_index(folder / f"{name}.idx", n_tokens, meta)
    elif n_tokens < context_length + 1:
        raise BadInput(
            f"{path} holds {n_tokens} tokens, less than one window of context_length={context_length} and its "
            f"last target; expected at least {context_length + 1}: use more text or a shorter context"
        )


def files_of(folder, name, meta):
    """{path: number of tokens} of a split's token files, in order; the number is None if meta.json does not say."""
    return {folder / file: count for file, count in token_files(meta, name).items()}


def check_index(path, n_tokens, meta):
    """Raises BadInput unless the index cuts a split into documents of two tokens or more. Reads it in parts."""
    digest, last = hashlib.sha256(), None
    try:
        for part in files.read_parts(path, limit=8 * (n_tokens // 2 + 1)):
            digest.update(part)
            last = last_offset(part, last, n_tokens)
    except OSError as error:
        raise BadInput(f"{path} is missing or cannot be read ({error}); prepare the dataset again") from None
    except ValueError:
        last = None
    if last != n_tokens:
        raise BadInput(f"{path} does not fit the token files beside it; prepare the dataset again")
    check_digest(path, digest.hexdigest(), meta)


def last_offset(part, last, n_tokens):
    """The last of the offsets in a part of an index, after `last` (None: the first part). Raises ValueError."""
    offsets = np.frombuffer(part, dtype="<u8")  # of whole ones
    lengths = np.diff(np.minimum(offsets, n_tokens + 1).astype(np.int64), prepend=-2 if last is None else last)
    if lengths.min() < 2 or (last is None and offsets[0]) or offsets[-1] > n_tokens:
        raise ValueError("no index")
    return int(offsets[-1])


def check_digest(path, sha256, meta):
    """Raises BadInput if meta.json has another SHA-256 of the file. A folder made by nanoGPT has none."""
    if "sha256" in meta and sha256 != meta["sha256"].get(path.name):
        raise BadInput(f"{path} is not the file that meta.json describes: another SHA-256; prepare the dataset again")


def contents(path, limit=2**26):
    """The bytes of a small file of the dataset."""
    try:
        return files.read(path, limit)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is missing or cannot be read ({error}); prepare the dataset again") from None


def verify(folder, meta, everything=False):
    """Raises BadInput unless the token files are those that meta.json describes, with ids below vocab_size.

    Reads those files whole of which no valid check is remembered; with `everything`, all of them.
    """
    remembered = {} if everything else recall(folder)
    found = {}
    for path, n_blocks in sampled_files(folder, meta):
        try:
            found[path.name] = facts = examine(path, meta["dtype"], n_blocks, remembered.get(path.name))
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read ({error}); prepare the dataset again") from None
        check_digest(path, facts.sha256, meta)
        if facts.largest_id >= meta["vocab_size"]:
            raise BadInput(
                f"{path} holds token id {facts.largest_id}, beyond vocab_size={meta['vocab_size']}; expected ids below "
                f"it: set --vocab_size={facts.largest_id + 1} or more, or prepare the dataset again"
            )
    if found != remembered:
        save(folder, found)


def remember(folder, meta, scanned):
    """Remembers that the token files were read whole. scanned: {file name: what scan() returned}."""
    found = {}
    for path, n_blocks in sampled_files(folder, meta):
        found[path.name] = Facts(*identity(path, meta["dtype"], n_blocks), *scanned[path.name])
    save(folder, found)


def save(folder, found):
    """Writes what recall() returns."""
    text = json.dumps({name: facts._asdict() for name, facts in found.items()}, indent=2) + "\n"
    with contextlib.suppress(OSError):  # a folder that cannot be written is checked again next time
        files.write(folder / VERIFIED, text)


def recall(folder):
    """{file name: Facts} of the last full check; {} if there was none or its record is damaged."""
    try:
        found = {name: Facts(**facts) for name, facts in json.loads(files.read(folder / VERIFIED)).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: facts for name, facts in found.items() if type(facts.largest_id) is int}


def sampled_files(folder, meta):
    """[(path, number of sampled blocks)] of all token files."""
    splits = [list(files_of(folder, name, meta)) for name in SPLITS]
    return [(path, blocks_each(len(paths))) for paths in splits for path in paths]


def examine(path, dtype, n_blocks, remembered):
    """Facts of a token file: the remembered ones if its identity is the same, else from reading it whole."""
    found = identity(path, dtype, n_blocks)
    if remembered and remembered[: len(found)] == found:
        return remembered
    return Facts(*found, *scan(path, dtype))


def identity(path, dtype, n_blocks):
    """The first Facts of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, sample(path, n_blocks), dtype


def sample(path, n_blocks=BLOCKS):
    """SHA-256 of 256 blocks of 16 KiB, evenly spaced from the first to the last; of all of a file up to 4 MiB."""
    digest, room = hashlib.sha256(), max(0, path.stat().st_size - BLOCK)
    step = max(BLOCK, room / (n_blocks - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(n_blocks):
            file.seek(int(number * step))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def sample_all(paths):
    """The sample of the files of a split."""
    if len(paths) == 1:
        return sample(paths[0])
    return hashlib.sha256("".join(sample(path, blocks_each(len(paths))) for path in paths).encode()).hexdigest()


def blocks_each(n_files):
    """Number of sampled blocks of each token file of a split: of up to 32 files, together those of one."""
    return max(8, BLOCKS // n_files)


def scan(path, dtype, chunk=2**22):
    """SHA-256 and largest id of a token file, read whole, chunk bytes at a time."""
    digest, largest_id = hashlib.sha256(), 0
    size = path.stat().st_size
    with (
        open(path, "rb") as file,
        tqdm(total=size, desc=f"checking {path.name}", unit="B", unit_scale=True, delay=1, disable=None) as progress,
    ):
        while part := file.read(chunk):
            digest.update(part)
            largest_id = max(largest_id, int(np.frombuffer(part, dtype).max()))
            progress.update(len(part))
    return digest.hexdigest(), largest_id
