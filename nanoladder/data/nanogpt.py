"""meta.pkl, the vocabulary of a folder of characters that nanoGPT prepared.

A pickle can name any function to be called. Reading this one calls none. Python's unpickler in Python does it, as the
one in C can be made to allocate gigabytes by a few bytes.
"""

import io
import os
import pickle

from nanoladder import files
from nanoladder.data.tokenizer import DESCRIPTION, EVERY_CHARACTER, make_encoding
from nanoladder.errors import BadInput

FILE, LIMIT = "meta.pkl", 2**22  # bytes; one of 65 characters has 700


class PlainUnpickler(pickle._Unpickler):
    """Unpickler of dicts, lists, texts and numbers. Raises UnpicklingError for an object of a class."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def has_vocabulary(folder):
    """True if nanoGPT's meta.pkl describes the folder; beside a tokenizer of ours, it is left over from before."""
    return os.path.lexists(folder / FILE) and not os.path.lexists(folder / DESCRIPTION)


def read_tokenizer(folder):
    """Returns the tokenizer of a folder's meta.pkl, a tiktoken.Encoding of characters.

    Raises BadInput if the file is more than a plain dict of nanoGPT's entries, or a token is not a single character.
    """
    path = folder / FILE
    try:
        meta = PlainUnpickler(io.BytesIO(files.read(path, LIMIT))).load()
        return make_encoding("char", EVERY_CHARACTER, characters(meta["vocab_size"], meta["itos"], meta["stoi"]))
    except KeyError as error:
        reason = f"it has no {error}"
    except Exception as error:  # a damaged pickle fails in many ways
        reason = str(error) or type(error).__name__
    raise BadInput(
        f"{path} is not the vocabulary of a folder of characters made by nanoGPT ({reason:.200}); expected a dict of "
        "vocab_size, itos and stoi; without this file, --vocab_size=N gives the number of token ids"
    )


def characters(n_vocab, itos, stoi):
    """Returns the characters of ids 0 to n_vocab - 1 in UTF-8. Raises ValueError if they are not that."""
    if sorted(itos) != list(range(len(itos))) or not 0 < len(itos) == n_vocab <= 2**16:  # what uint16 holds
        raise ValueError(f"its ids are not those from 0 to vocab_size={n_vocab!r:.40}")
    if stoi != {text: token for token, text in itos.items()}:
        raise ValueError("its stoi and itos differ")
    for token, text in itos.items():
        if len(text) != 1:
            raise ValueError(f"its token {token} is {text!r:.40}, no single character")
    return [itos[token].encode() for token in range(n_vocab)]
