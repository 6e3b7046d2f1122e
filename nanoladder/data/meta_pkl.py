"""meta.pkl, the vocabulary of a folder of characters that nanoGPT prepared."""

import io
import os
import pickle

from nanoladder import files
from nanoladder.data.tokenizer import DESCRIPTION, EVERY_CHARACTER, make_encoding
from nanoladder.errors import reading

FILE = "meta.pkl"


class PlainUnpickler(pickle.Unpickler):
    """Unpickler for dicts, lists, texts and numbers; never calls a function that the pickle names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def has_vocabulary(folder):
    """True if nanoGPT's meta.pkl describes the folder; beside one of our tokenizers, it is a leftover."""
    return os.path.lexists(folder / FILE) and not os.path.lexists(folder / DESCRIPTION)


def read_tokenizer(folder):
    """Returns the tokenizer of a folder's meta.pkl, a tiktoken.Encoding of characters. Raises BadInput."""
    path = folder / FILE
    said = f"{path} is not the vocabulary of a folder of characters made by nanoGPT"
    with reading(said, "without this file, --vocab_size=N gives the number of token ids"):
        meta = PlainUnpickler(io.BytesIO(files.read(path))).load()
        characters = [meta["itos"][token] for token in range(meta["vocab_size"])]
        if not characters or set(map(len, characters)) != {1} or len(set(characters)) < len(characters):
            raise ValueError("its tokens are not characters, each of them once")
        return make_encoding("char", EVERY_CHARACTER, [character.encode() for character in characters])
