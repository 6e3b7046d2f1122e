"""Writes a prepared dataset, for every data/*/prepare.py.

train.bin, val.bin: the token ids and nothing else, little-endian uint16, or uint32 beyond 65536 token ids.
train.idx, val.idx: only for a dataset of separate documents; little-endian uint64, the place among the ids at which
each document begins, and last the number of tokens: documents + 1 entries.
tokenizer.json, tokenizer.tiktoken: the tokenizer, as tokenizer/encoding.py saves it.
meta.json: a description, with a digest of every file and of itself. It is written last: if it exists, the other files
are complete and match it.

Memory use does not depend on the size of the corpus or the number of cores, and neither does the result.
resume.py describes how an interrupted preparation continues.
"""

import argparse
import contextlib
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoladder import files
from nanoladder.entry import Parser
from nanoladder.errors import BadInput
from nanoladder.prepare.corpus import Corpus, sha256_of
from nanoladder.prepare.encode import encoded
from nanoladder.prepare.meta import DATA_DIR, FORMAT_VERSION, SPLITS, sample_digest
from nanoladder.prepare.resume import JOURNAL, LOCK, META, SplitFiles, Unfinished
from nanoladder.tokenizer.encoding import (
    build_tokenizer,
    description,
    encode,
    end_of_text,
    identify,
    is_name,
    load_tokenizer,
    save_tokenizer,
)
from nanoladder.tokenizer.existing import PLACES, existing_tokenizer, name_or_place

SAMPLE = 2**30  # leading bytes of train on which bpe is trained
JOURNAL_TOKENS = 10_000_000  # between journal entries


class PrepareParser(Parser):
    """A command line with the options that every prepare.py has."""

    def __init__(self, description: str | None, tokenizer: str) -> None:
        super().__init__(description=description, allow_abbrev=False)
        self.add_argument(
            "--tokenizer",
            type=name_or_place,
            default=tokenizer,
            metavar="NAME|PATH",
            help="gpt2, char, byte, or bpe:N, trained on this text to N tokens; or, to train an existing model on this "
            f"text, the place of its tokenizer: {PLACES} (default: %(default)s)",
        )
        self.add_argument(
            "--out_dir",
            metavar="DIR",
            help="folder to write to (default: this script's own; with another tokenizer, one beside it)",
        )
        self.add_argument(
            "--overwrite",
            action="store_true",
            help="replace another dataset in that folder, which models trained on it may need",
        )

    def out_dir(self, args: Namespace, script: Path | str) -> Path:
        """The folder to write to: data/<dataset>, or data/<dataset>_<tokenizer> if the tokenizer is not the default."""
        home = Path(script).resolve().parent
        if args.out_dir:
            return Path(args.out_dir)
        if args.tokenizer == self.get_default("tokenizer"):
            return home
        tokenizer = args.tokenizer
        name = tokenizer.replace(":", "") if is_name(tokenizer) else re.sub(r"\W+", "_", tokenizer).strip("_")
        return home.with_name(f"{home.name}_{name}")

    def write(self, args: Namespace, script: Path | str, corpus: Corpus, **settings: Any) -> None:
        """Writes a corpus as the options say, and prints how to train on it. settings: as write_corpus() takes them."""
        folder = self.out_dir(args, script)
        meta = write_corpus(folder, corpus, args.tokenizer, **settings, overwrite=args.overwrite)
        print(summary(folder, meta))


def fraction(text: str) -> float:
    """Converts an option's text to a number strictly between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number between 0 and 1, such as 0.1")
    return value


def write_corpus(folder, corpus, tokenizer, extra=None, documents=False, limit_tokens=None, overwrite=False):
    """Builds the tokenizer, encodes both splits and writes them, all or nothing. Returns the entries of meta.json.

    folder: created if needed. If it holds the dataset of the same arguments, nothing is written; if that is damaged, it
    is written again. After an interruption, the next call with the same arguments continues from the last journal.
    overwrite: replace another dataset in the folder, once the new one is complete.
    corpus: a Corpus. bpe is trained only on the first SAMPLE bytes of train; char knows the characters of both splits.
    tokenizer: a name that build_tokenizer knows, or a place that existing_tokenizer knows.
    extra: dict of further entries of meta.json.
    documents: False: one stream of tokens, with `<|endoftext|>` after each text if the tokenizer has it. True: separate
        documents and their .idx, each between two separators: `<|endoftext|>`, or "\n" if there is no such token.
    limit_tokens: stop after the document that reaches this number, train and val together (None: never).
    Raises BadInput for an empty split, a folder that cannot be written or holds something else, or a corpus that cannot
    be read.
    """
    folder, identity = Path(folder), tokenizer
    if not is_name(tokenizer):
        tokenizer = existing_tokenizer(tokenizer)
        identity = description(tokenizer) | identify(tokenizer)
    job = sha256_of(json.dumps([FORMAT_VERSION, identity, corpus.identity, extra, documents, limit_tokens]))
    try:
        with Unfinished(folder, job, overwrite) as work:
            if work.meta:
                return work.meta
            encoding = make_tokenizer(work, corpus, tokenizer, documents, limit_tokens)
            counts = write_tokens(work, corpus, encoding, documents, limit_tokens)
            meta = describe(work, encoding, corpus, documents, counts, extra or {})
            work.move_into_place()
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}; try another --out_dir") from None
    return meta


def make_tokenizer(work, corpus, tokenizer, documents, limit_tokens):
    """Returns the tokenizer saved with unfinished work, or the given one: an Encoding, or a name, to build it."""
    if work.journal:
        return load_tokenizer(work.path)
    encoding = tokenizer
    if isinstance(tokenizer, str):
        encoding = build_tokenizer(tokenizer, texts_to_learn(corpus, tokenizer, documents, limit_tokens))
    save_tokenizer(encoding, work.path)
    return encoding


def texts_to_learn(corpus, tokenizer, documents, limit_tokens):
    """Yields the texts from which a tokenizer is built: all of them for char, the beginning of train for bpe."""
    room = min(SAMPLE, 4 * (limit_tokens or SAMPLE)) if tokenizer.startswith("bpe") else float("inf")
    for piece in corpus.pieces():
        if piece.split == "train" or tokenizer == "char":
            yield piece.text
            room -= len(piece.text.encode(errors="replace"))
        if room <= 0:
            break
    if documents and tokenizer == "char":
        yield "\n"


def write_tokens(work, corpus, encoding, documents, limit_tokens):
    """Encodes the corpus, or the rest of it, into token files. Returns each split's counts."""
    dtype, eot = dtype_of(encoding), end_of_text(encoding)
    after = np.array([eot] if eot is not None else encode(encoding, "\n" * documents), dtype)
    before = after[: len(after) * documents]
    journal = work.journal or {"counts": {}, "place": None}
    with contextlib.ExitStack() as stack:
        splits = {}
        for name in SPLITS:
            split = SplitFiles(work.path, name, dtype.itemsize, documents, journal["counts"].get(name))
            splits[name] = stack.enter_context(contextlib.closing(split))

        def n_tokens():
            return sum(split.counts["tokens"] for split in splits.values())

        bar = {"unit": " tokens", "unit_scale": True, "disable": None}  # shows the rate and, with a limit, time left
        progress = stack.enter_context(tqdm(desc="encoding", total=limit_tokens, initial=n_tokens(), **bar))
        chunks = stack.enter_context(contextlib.closing(encoded(corpus, journal["place"], encoding, dtype)))
        last_journal = n_tokens()
        for pieces, encodings, place in chunks:
            for piece, (ids, n_bytes) in zip(pieces, encodings, strict=True):
                splits[piece.split].append(piece, ids, n_bytes, before, after)
                if limit_tokens and piece.last and n_tokens() >= limit_tokens:
                    return {name: split.sync() for name, split in splits.items()}
            progress.update(n_tokens() - progress.n)
            if place is not None and n_tokens() - last_journal >= JOURNAL_TOKENS:
                last_journal = n_tokens()
                work.save({"counts": {name: split.sync() for name, split in splits.items()}, "place": place})
        return {name: split.sync() for name, split in splits.items()}


def dtype_of(encoding):
    """The dtype of token ids in a file."""
    return np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")


def describe(work, encoding, corpus, documents, counts, extra):
    """Writes meta.json. Returns its entries."""
    for name, count in counts.items():
        if not count["bytes"] or count["tokens"] < 2:
            raise BadInput(f"too little text for {name}, not even two tokens; give more text or another --val_fraction")
    paths = sorted(path for path in work.path.iterdir() if path.name not in (META, JOURNAL, LOCK))
    meta = {
        "format_version": FORMAT_VERSION,
        "job": work.job,
        "tokenizer": encoding.name,
        "vocab_size": encoding.n_vocab,
        "dtype": dtype_of(encoding).name,
        "tokens": {name: count["tokens"] for name, count in counts.items()},
        "bytes": {name: count["bytes"] for name, count in counts.items()},  # separators not counted
        "digests": {path.name: sample_digest(path) for path in paths},
        "documents": documents,
        **({"validation": corpus.validation} if corpus.validation else {}),
        **extra,
    }
    meta = files.seal(meta)
    files.write(work.path / META, json.dumps(meta, indent=2) + "\n")
    return meta


def summary(folder, meta):
    """Returns lines on the folder's contents and the option that trains on it."""
    folder = Path(folder).resolve()
    dataset = folder.name if folder.parent == DATA_DIR else folder
    splits = ", ".join(f"{split} {n_tokens:,} tokens" for split, n_tokens in meta["tokens"].items())
    vocabulary = f"{meta['tokenizer']} vocabulary of {meta['vocab_size']:,}"
    return f"{folder}\n  {splits}, {vocabulary}\n  train on it with --dataset={dataset}"
