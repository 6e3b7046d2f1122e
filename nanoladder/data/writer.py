"""Writes a prepared dataset. Every data/*/prepare.py calls it.

train.bin, val.bin: the token ids and nothing else, little-endian uint16, or uint32 beyond 65536 token ids.
train.idx, val.idx: only for a dataset of separate documents; little-endian uint64, the place in the .bin at which each
document begins, and last the number of tokens: documents + 1 entries.
tokenizer.json, tokenizer.tiktoken: the tokenizer, as tokenizer.py saves it.
meta.json: a description, with the SHA-256 of every file and of itself. It is written last: if it is there, the other
files are whole and belong to it.
"""

import argparse
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanoladder import files
from nanoladder.data.meta import FORMAT_VERSION, checksum
from nanoladder.data.tokenizer import build_tokenizer, check_name, encode, end_of_text, save_tokenizer
from nanoladder.entry import Parser
from nanoladder.errors import BadInput

DATA_DIR = Path(__file__).resolve().parents[2] / "data"
BLOCK = 2**20  # characters encoded at a time

# After a newline between two characters that are not space: every tokenizer here cuts the text there anyway.
SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")


class PrepareParser(Parser):
    """A command line with the options that every prepare.py has."""

    def __init__(self, description, tokenizer):
        super().__init__(description=description, allow_abbrev=False)
        self.add_argument(
            "--tokenizer",
            default=tokenizer,
            metavar="NAME",
            help="gpt2, char, byte, or bpe:N, trained on this text to N tokens (default: %(default)s)",
        )
        self.add_argument(
            "--out_dir",
            metavar="DIR",
            help="folder to write to (default: this script's own; with another tokenizer, one beside it)",
        )

    def parse_args(self, argv):
        args = super().parse_args(argv)
        check_name(args.tokenizer)
        return args

    def out_dir(self, args, script):
        """The folder to write to: data/<dataset>, or data/<dataset>_<tokenizer> if the tokenizer is not the default."""
        home = Path(script).resolve().parent
        if args.out_dir:
            return Path(args.out_dir)
        if args.tokenizer == self.get_default("tokenizer"):
            return home
        return home.with_name(f"{home.name}_{args.tokenizer.replace(':', '')}")


def fraction(text):
    """Converts an option's text to a number strictly between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number between 0 and 1, such as 0.1")
    return value


def split_documents(documents, val_fraction, keys=None):
    """Splits documents into (train, val), each in the given order; val gets those whose keys hash lowest.

    documents: list of str. val_fraction: the part of their number that val gets, at least one document.
    keys: list of str, one for each (default: the documents). Equal keys land on the same side, except at the edge.
    """
    if len(documents) < 2:
        raise BadInput(f"{len(documents)} document found, but train and val need one each; give more text")
    n_val = min(max(1, round(len(documents) * val_fraction)), len(documents) - 1)
    hashes = [hashlib.sha256(key.encode()).digest() for key in keys or documents]
    val = set(sorted(range(len(documents)), key=hashes.__getitem__)[:n_val])
    train = [document for i, document in enumerate(documents) if i not in val]
    return train, [documents[i] for i in sorted(val)]


def split_text(text, val_fraction):
    """Splits a text into ([train], [val]); val is the last val_fraction of its characters."""
    cut = int(len(text) * (1 - val_fraction))
    return [text[:cut]], [text[cut:]]


def write_dataset(folder, train, val, tokenizer, extra=None, documents=False):
    """Builds the tokenizer, encodes both splits and writes them, all or nothing. Returns the entries of meta.json.

    folder: made if needed; an older dataset in it is replaced only once the new one is complete.
    train, val: lists of str. bpe is trained on train alone; char knows the characters of both.
    tokenizer: a name that build_tokenizer knows. extra: dict of further entries of meta.json.
    documents: False: one stream of tokens, with `<|endoftext|>` after each text if the tokenizer has it.
        True: separate documents and their .idx, each of them separator + text + separator; the separator is
        `<|endoftext|>`, or "\n" if the tokenizer has none.
    Raises BadInput: an empty split, a folder that cannot be written.
    """
    for split, texts in (("train", train), ("val", val)):
        if not any(texts):
            raise BadInput(f"no text left for {split}; give more text or another val_fraction")
    learned_from = train if tokenizer.startswith("bpe") else [*train, *val, "\n" * documents]
    encoding = build_tokenizer(tokenizer, learned_from)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")
    eot = end_of_text(encoding)
    after = [eot] if eot is not None else encode(encoding, "\n" * documents)
    before = after if documents else []
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".prepare-") as temporary:
            temporary = Path(temporary)
            offsets = {
                split: write_tokens(temporary / f"{split}.bin", texts, encoding, dtype, before, after)
                for split, texts in (("train", train), ("val", val))
            }
            if documents:
                for split in offsets:
                    files.write(temporary / f"{split}.idx", np.array(offsets[split], "<u8").tobytes())
            save_tokenizer(encoding, temporary)
            meta = {
                "format_version": FORMAT_VERSION,
                "tokenizer": tokenizer,
                "vocab_size": encoding.n_vocab,
                "dtype": dtype.name,
                "tokens": {split: offsets[split][-1] for split in offsets},
                "bytes": {"train": utf8_bytes(train), "val": utf8_bytes(val)},  # separators not counted
                "sha256": {path.name: sha256(path) for path in sorted(temporary.iterdir())},
                "documents": documents,
                **(extra or {}),
            }
            meta["checksum"] = checksum(meta)
            files.write(temporary / "meta.json", json.dumps(meta, indent=2) + "\n")
            move_into_place(temporary, folder)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}; try another --out_dir") from None
    return meta


def write_tokens(path, texts, encoding, dtype, before, after):
    """Writes before + ids + after for each text. Returns the place, in tokens, at which each begins; the total last."""
    offsets = [0]
    with (
        open(path, "wb") as file,
        tqdm(total=utf8_bytes(texts), desc=path.stem, unit="B", unit_scale=True, disable=None) as progress,
    ):
        for text in texts:
            file.write(np.array(before, dtype).tobytes())
            for block in blocks(text):
                file.write(np.array(encode(encoding, block), dtype).tobytes())
                progress.update(len(block.encode()))
            file.write(np.array(after, dtype).tobytes())
            offsets.append(file.tell() // dtype.itemsize)
        file.flush()
        os.fsync(file.fileno())
    return offsets


def blocks(text):
    """Cuts a text into blocks of about BLOCK characters, whose ids one after the other are those of the text."""
    start = 0
    while start < len(text):
        cut = SAFE_CUT.search(text, start + BLOCK)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def move_into_place(temporary, folder):
    """Replaces the dataset in folder. Interrupted at any point, it leaves no meta.json beside files of another."""
    (folder / "meta.json").unlink(missing_ok=True)
    for split in ("train", "val"):  # the older dataset may have been one of documents
        (folder / f"{split}.idx").unlink(missing_ok=True)
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == "meta.json"):  # meta.json last
        os.replace(path, folder / path.name)


def utf8_bytes(texts):
    return sum(len(text.encode()) for text in texts)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def summary(folder, meta):
    """One line that says what was written and how to train on it."""
    folder = Path(folder).resolve()
    dataset = folder.name if folder.parent == DATA_DIR else folder
    splits = ", ".join(
        f"{split} {n_tokens:,} tokens ({meta['bytes'][split] / 1e6:.2f} MB of text)"
        for split, n_tokens in meta["tokens"].items()
    )
    vocabulary = f"{meta['tokenizer']} vocabulary of {meta['vocab_size']:,}"
    return f"wrote {folder}: {splits}, {vocabulary}; train on it with --dataset={dataset}"
