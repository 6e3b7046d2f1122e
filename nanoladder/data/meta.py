"""meta.json of a prepared folder: its format, its checksum, and how it is read.

A folder may come from anywhere: what its meta.json says is checked first. A folder made by nanoGPT has none.
"""

import hashlib
import json
import os

from nanoladder import files
from nanoladder.errors import BadInput

FORMAT_VERSION = 2  # of a prepared folder, which writer.py writes and meta.py reads
SPLITS = ("train", "val")
LARGEST_VOCABULARY = {"uint16": 2**16, "uint32": 2**32}  # by dtype


def checksum(meta):
    """SHA-256 of everything in a meta.json but its own entry "checksum"."""
    rest = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_meta(folder, vocab_size):
    path = folder / "meta.json"
    if not os.path.lexists(path):
        if not vocab_size:
            raise BadInput(
                f"{folder} has no meta.json; prepare it again, or, for headerless uint16 files as nanoGPT "
                "writes them, say what they hold with --vocab_size=N (50257 for GPT-2's tokenizer)"
            )
        return {"vocab_size": vocab_size, "dtype": "uint16", "documents": False}
    try:
        meta = checked(json.loads(files.read(path)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path} is not the meta.json of a prepared dataset ({reason}); prepare it again") from None
    own = meta["vocab_size"]
    if vocab_size and vocab_size < own:
        raise BadInput(f"vocab_size={vocab_size} is below the {own} token ids of {folder}; expected {own} or 0 for it")
    return {**meta, "vocab_size": vocab_size or own}


def checked(meta):
    """The entries of a meta.json that are used. Raises ValueError, KeyError or TypeError: not as writer.py writes."""

    def require(condition, what):
        if not condition:
            raise ValueError(what)

    version, dtype = meta["format_version"], meta["dtype"]
    require(
        (version, dtype) in [(FORMAT_VERSION, name) for name in LARGEST_VOCABULARY],
        f"format {version!r:.40} with {dtype!r:.40}; expected format {FORMAT_VERSION} with uint16 or uint32",
    )
    keys = ("vocab_size", "dtype", "documents", "tokenizer", "tokens", "bytes", "sha256")
    used = {key: meta[key] for key in keys}
    counts = {key: [used[key][name] for name in SPLITS] for key in ("tokens", "bytes")}
    counts["vocab_size"] = [used["vocab_size"]]
    for key, values in counts.items():
        most = LARGEST_VOCABULARY[dtype] if key == "vocab_size" else 2**63 - 1
        whole = all(type(value) is int and 1 <= value <= most for value in values)
        require(whole, f"{key}: expected whole numbers from 1 to {most}")
    require(type(used["documents"]) is bool, "documents: expected true or false")
    name = used["tokenizer"]
    require(isinstance(name, str) and name.isprintable() and len(name) < 100, "tokenizer: expected its name")
    require(isinstance(used["sha256"], dict), "sha256: expected the digest of each file")
    require(meta["checksum"] == checksum(meta), "its checksum is not that of its contents")
    return used
