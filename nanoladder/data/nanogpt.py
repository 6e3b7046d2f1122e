"""meta.pkl, the vocabulary of a folder of characters that nanoGPT prepared.

A pickle can name any function to be called. Reading this one calls none: of pickle's operations only those that build
dicts, texts and whole numbers are carried out. Python's unpickler in Python does it, as the one in C can be made to
allocate gigabytes by a few bytes.
"""

import io
import os
import pickle

from nanoladder import files
from nanoladder.data.tokenizer import DESCRIPTION, EVERY_CHARACTER, make_encoding
from nanoladder.errors import BadInput

FILE, LIMIT = "meta.pkl", 2**22  # bytes; one of 65 characters has 700
LARGEST_VOCABULARY = 2**16  # token ids that uint16 holds
PLAIN = "PROTO FRAME STOP MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET EMPTY_DICT DICT SETITEM SETITEMS"
PLAIN += " UNICODE BINUNICODE SHORT_BINUNICODE INT BININT BININT1 BININT2 LONG1 GLOBAL STACK_GLOBAL"


class PlainUnpickler(pickle._Unpickler):
    """Unpickler of dicts, texts and whole numbers. Raises UnpicklingError for anything else."""

    def refuse(self, name="an object"):
        raise pickle.UnpicklingError(f"it holds {name}")

    def find_class(self, module, name):
        self.refuse(f"{module}.{name}")

    dispatch = dict.fromkeys(range(256), refuse) | {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in PLAIN.split())
    }


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
    if type(n_vocab) is not int or not 1 <= n_vocab <= LARGEST_VOCABULARY:
        raise ValueError(f"its vocab_size is {n_vocab!r:.40}")
    if not type(itos) is type(stoi) is dict or not len(itos) == len(stoi) == n_vocab:
        raise ValueError(f"its itos and stoi are not dicts of {n_vocab} entries")
    for token, text in itos.items():
        if type(token) is not int or token not in range(n_vocab) or type(text) is not str or len(text) != 1:
            raise ValueError(f"its token {token!r:.40} is {text!r:.40}, no single character")
        if stoi.get(text) != token:
            raise ValueError(f"its stoi and itos differ about {text!r}")
    return [itos[token].encode() for token in range(n_vocab)]
