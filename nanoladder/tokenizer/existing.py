"""Tokenizers that exist already, in the folder of a run, a dataset or a model from elsewhere."""

import os
from pathlib import Path

from tiktoken import Encoding

from nanoladder.errors import BadInput
from nanoladder.tokenizer import meta_pkl
from nanoladder.tokenizer.encoding import DESCRIPTION, KINDS, RANKS, is_name, load_tokenizer
from nanoladder.tokenizer.hub import HUB, find_folder
from nanoladder.tokenizer.huggingface import TOKENIZER, TOKENIZER_CONFIG, from_huggingface

PLACES = "the folder of a run or dataset, hf:NAME or hf:FOLDER"


def existing_tokenizer(place: Path | str) -> Encoding:
    """Returns the tokenizer, a tiktoken.Encoding, of a run, a dataset or a model from elsewhere.

    place: its folder, perhaps made by nanoGPT, or hf:NAME or hf:FOLDER. Raises BadInput if there is no tokenizer, it is
    damaged, or tiktoken cannot represent it.
    """
    place = str(place)
    if place.startswith(HUB):
        return from_huggingface(find_folder(place.removeprefix(HUB), [TOKENIZER, TOKENIZER_CONFIG]))
    folder = Path(place)
    if meta_pkl.exists(folder) and (tokenizer := meta_pkl.read_tokenizer(folder)):
        return tokenizer
    if os.path.lexists(folder / DESCRIPTION) and not os.path.lexists(folder / RANKS):
        return from_huggingface(folder)
    return load_tokenizer(folder)


def name_or_place(text: str) -> str:
    """Returns the text if it names a kind of tokenizer or a place that has one. Raises BadInput otherwise."""
    if not is_name(text):
        if not (text.startswith(HUB) or Path(text).is_dir()):
            raise BadInput(f"tokenizer {text!r}: expected {KINDS}, such as bpe:4096; or {PLACES}, for its tokenizer")
        existing_tokenizer(text)
    return text


def how_to_prepare(place: Path | str) -> str:
    """Returns the command that prepares a text with the tokenizer of a place."""
    return f"`python data/text/prepare.py --input FILES --tokenizer={place} --out_dir=FOLDER`"
