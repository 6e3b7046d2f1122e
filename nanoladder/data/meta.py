"""meta.json, the description of a prepared folder: its format, its checksum, and reading it.

A folder may come from anywhere, so every entry is checked before it is used. A folder made by nanoGPT has no meta.json;
if it has characters, it has a meta.pkl.
"""

import hashlib
import json
import os

from nanoladder import files
from nanoladder.data import nanogpt
from nanoladder.errors import BadInput

FORMAT_VERSION = 2  # of a prepared folder
SPLITS = ("train", "val")
LARGEST_VOCABULARY = {"uint16": 2**16, "uint32": 2**32}  # token ids that a dtype can hold


def checksum(meta):
    """SHA-256 of all entries of a meta.json except "checksum" itself."""
    rest = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_meta(folder, vocab_size):
    """The entries of a folder's meta.json, with vocab_size in place of its own unless that is 0.

    For a folder made by nanoGPT, which has no meta.json: vocab_size, dtype and documents, and tokenizer if meta.pkl has
    it. Raises BadInput: damaged, of another format, or more token ids than vocab_size.
    """
    path, foreign = folder / "meta.json", {"dtype": "uint16", "documents": False}
    if os.path.lexists(path):
        try:
            meta = check_entries(json.loads(files.read(path)))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadInput(f"{path} is not the meta.json of a prepared dataset ({reason}); prepare it again") from None
    elif nanogpt.has_vocabulary(folder):
        meta = {**foreign, "vocab_size": nanogpt.read_tokenizer(folder).n_vocab, "tokenizer": "char"}
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


def shard_name(split, number):
    """Name of a token file of a split that has several."""
    return f"{split}_{number:03d}.bin"


def token_files(meta, split):
    """{name: number of tokens} of a split's token files, in order; of a folder made by nanoGPT the number is None."""
    if counts := meta.get("shards", {}).get(split):
        return {shard_name(split, number): count for number, count in enumerate(counts)}
    return {f"{split}.bin": meta["tokens"][split] if "tokens" in meta else None}


def check_entries(meta):
    """The entries of a meta.json that are used. Raises ValueError, KeyError or TypeError if writer.py cannot have
    written it."""

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
    require(isinstance(name, str) and name.isprintable() and len(name) < 100, "tokenizer: expected a name")
    require(isinstance(used["sha256"], dict), "sha256: expected the digest of each file")
    used["shards"] = meta.get("shards", {})  # of splits in several files
    require(isinstance(used["shards"], dict), "shards: expected the number of tokens in each file")
    for split, counts in used["shards"].items():
        whole = isinstance(counts, list) and all(type(count) is int and count >= 1 for count in counts)
        require(whole and sum(counts) == used["tokens"].get(split), "shards: expected counts that add up to the tokens")
    require(meta["checksum"] == checksum(meta), "the checksum does not match the entries")
    return used
