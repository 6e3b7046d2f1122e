"""meta.pkl, in which nanoGPT states the vocabulary of a folder that it prepared."""

import io
import os
import pickle
from pathlib import Path

from tiktoken import Encoding

from nanoladder import files
from nanoladder.errors import reading
from nanoladder.tokenizer.encoding import DESCRIPTION, EVERY_CHARACTER, make_encoding

FILE = "meta.pkl"


class PlainUnpickler(pickle.Unpickler):
    """Unpickler for dicts, lists, texts and numbers; never calls a function that the pickle names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def exists(folder: Path) -> bool:
    """True if nanoGPT's meta.pkl describes the folder; beside one of our tokenizers, it is a leftover."""
    return os.path.lexists(folder / FILE) and not os.path.lexists(folder / DESCRIPTION)


def read(folder: Path) -> dict:
    """Returns the entries of a folder's meta.pkl: vocab_size; itos, if the tokens are characters: {id: character}.

    It may also state the ids' dtype, which nanoGPT leaves out. Raises BadInput.
    """
    with reading(
        f"{folder / FILE} does not describe a folder made by nanoGPT",
        "without this file, --vocab_size=N gives the number of token ids",
    ):
        meta = PlainUnpickler(io.BytesIO(files.read(folder / FILE))).load()
        if type(meta["vocab_size"]) is not int or meta["vocab_size"] < 1:
            raise ValueError(f"vocab_size={meta['vocab_size']!r:.40}, expected the number of token ids")
        if "itos" in meta:
            characters = [meta["itos"][token] for token in range(meta["vocab_size"])]
            if set(map(len, characters)) != {1} or len(set(characters)) < len(characters):
                raise ValueError("its tokens are not characters, each of them once")
            "".join(characters).encode()  # fails for half a surrogate pair
        return meta


def read_tokenizer(folder: Path) -> Encoding | None:
    """Returns the tokenizer of a folder's meta.pkl, a tiktoken.Encoding of characters, or None. Raises BadInput."""
    meta = read(folder)
    if "itos" not in meta:
        return None
    return make_encoding("char", EVERY_CHARACTER, [meta["itos"][token].encode() for token in range(meta["vocab_size"])])
