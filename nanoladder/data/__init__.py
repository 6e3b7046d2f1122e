"""Tokenizers, prepared datasets and the loader; a folder a dataset, each with its prepare.py."""

import hashlib
import json

FORMAT_VERSION = 2  # of a prepared folder, which writer.py writes and loader.py reads


def checksum(meta):
    """SHA-256 of everything in a meta.json but its own entry "checksum"."""
    rest = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
