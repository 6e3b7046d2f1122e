"""Writes a prepared dataset. Every data/*/prepare.py calls it.

train.bin, val.bin: the token ids and nothing else, little-endian uint16, or uint32 beyond 65536 token ids. A split of
more than shard_tokens ids is several files instead, train_000.bin and so on, each but the last of shard_tokens ids.
train.idx, val.idx: only for a dataset of separate documents; little-endian uint64, the place among the ids at which
each document begins, and last the number of tokens: documents + 1 entries.
tokenizer.json, tokenizer.tiktoken: the tokenizer, as tokenizer.py saves it.
meta.json: a description, with the SHA-256 of every file and of itself. It is written last: if it is there, the other
files are whole and belong to it.

Neither the memory that it takes nor the result depends on the size of the corpus or on the number of cores. shards.py
says how an interrupted preparation goes on.
"""

import argparse
import contextlib
import hashlib
import json
import re
from pathlib import Path
from nanoladder.entry import Parser

import numpy as np
from tqdm import tqdm

from nanoladder import files
from nanoladder.data import checks
from nanoladder.data.corpus import Texts
from nanoladder.data.datasets import DATA_DIR
from nanoladder.data.encode import encoded
from nanoladder.data.meta import FORMAT_VERSION, SPLITS, checksum
from nanoladder.data.shards import JOURNAL, LOCK, SplitFiles, Unfinished
from nanoladder.data.tokenizer import (
    build_tokenizer,
    check_name,
    encode,
    end_of_text,
    load_tokenizer,
    save_tokenizer,
)
from nanoladder.errors import BadInput

SHARD_TOKENS = 100_000_000
SAMPLE = 2**30  # bytes of train that bpe learns from, the first ones
UNLISTED = ("meta.json", JOURNAL, LOCK)


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

    def add_shard_tokens(self):
        self.add_argument(
            "--shard_tokens",
            type=whole_number,
            default=SHARD_TOKENS,
            metavar="N",
            help="token ids in a file; a split of more becomes several files (default: 100M)",
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


def whole_number(text):
    """Converts an option's text such as 1000, 1_000_000, 500M or 10B to a number of at least 1."""
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMBT]?)", text.upper())
    value = float(found[1]) * 1000 ** " KMBT".index(found[2] or " ") if found else 0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number such as 1_000_000, 500M or 10B")
    return int(value)


def write_dataset(folder, train, val, tokenizer, extra=None, documents=False):
    """Writes texts in memory, two lists of str, as write_corpus does."""
    for split, texts in (("train", train), ("val", val)):
        if not any(texts):
            raise too_little_text(split)
    return write_corpus(folder, Texts(train, val), tokenizer, extra, documents)


def write_corpus(
    folder,
    corpus,
    tokenizer,
    extra=None,
    documents=False,
    shard_tokens=SHARD_TOKENS,
    limit_tokens=None,
    workers=None,
):
    """Builds the tokenizer, encodes both splits and writes them, all or nothing. Returns the entries of meta.json.

    folder: made if needed; an older dataset in it is replaced only once the new one is complete. Interrupted, the next
    call with the same arguments goes on from the last full shard.
    corpus: a Corpus. bpe is trained on train alone, the first SAMPLE bytes of it; char knows the characters of both.
    tokenizer: a name that build_tokenizer knows. extra: dict of further entries of meta.json.
    documents: False: one stream of tokens, with `<|endoftext|>` after each text if the tokenizer has it.
        True: separate documents and their .idx, each of them separator + text + separator; the separator is
        `<|endoftext|>`, or "\n" if the tokenizer has none.
    shard_tokens: token ids in a file. limit_tokens: stop after the document that reaches so many, train and val
    together (None: never). workers: processes that encode (None: one a core).
    Raises BadInput: an empty split, a folder that cannot be written, a corpus that cannot be read.
    """
    folder = Path(folder)
    job = [FORMAT_VERSION, tokenizer, corpus.identity, extra, documents, shard_tokens, limit_tokens]
    try:
        with Unfinished(folder, job) as work:
            if "meta" not in (work.journal or {}):
                encoding = make_tokenizer(work, corpus, tokenizer, documents, limit_tokens)
                entries = write_tokens(work, corpus, encoding, documents, shard_tokens, limit_tokens, workers)
                meta, scanned = describe(work.path, tokenizer, encoding, corpus, documents, entries, extra or {})
                if work.journal:
                    work.save({"meta": meta, "scanned": scanned})
            else:
                meta, scanned = work.journal["meta"], work.journal["scanned"]
            work.move_into_place(meta)
        checks.remember(folder, meta, scanned)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}; try another --out_dir") from None
    return meta


def make_tokenizer(work, corpus, tokenizer, documents, limit_tokens):
    """The tokenizer saved with unfinished work, or a new one."""
    if work.journal:
        return load_tokenizer(work.path)
    encoding = build_tokenizer(tokenizer, texts_to_learn(corpus, tokenizer, documents, limit_tokens))
    save_tokenizer(encoding, work.path)
    return encoding


def texts_to_learn(corpus, tokenizer, documents, limit_tokens):
    """Yields the texts from which a tokenizer is built: for char all of them, for bpe the first of train."""
    room = min(SAMPLE, 4 * (limit_tokens or SAMPLE)) if tokenizer.startswith("bpe") else float("inf")
    with progress_bar("reading for the tokenizer", None if room == SAMPLE else corpus.n_bytes, delay=1) as progress:
        for piece in corpus.pieces():
            if piece.split == "train" or tokenizer == "char":
                yield piece.text
                room -= len(piece.text.encode())
            progress.update(corpus.bytes_read - progress.n)
            if room <= 0:
                break
    if documents and tokenizer == "char":
        yield "\n"


def write_tokens(work, corpus, encoding, documents, shard_tokens, limit_tokens, workers):
    """Encodes the corpus, or what is left of it, into token files. Returns what is counted meanwhile, for meta.json."""
    dtype = np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")
    eot = end_of_text(encoding)
    after = np.array([eot] if eot is not None else encode(encoding, "\n" * documents), dtype)
    before = after[: len(after) * documents]
    with contextlib.ExitStack() as stack:
        splits = {
            name: stack.enter_context(SplitFiles(work.path, name, dtype, shard_tokens, documents)) for name in SPLITS
        }
        journal = work.journal or {"splits": {}, "position": None, "done": 0}
        for name, state in journal["splits"].items():
            splits[name].go_on(state)
        total, unit = (limit_tokens, " tokens") if limit_tokens else (corpus.n_bytes, "B")
        progress = stack.enter_context(progress_bar("encoding", total, journal["done"], unit))
        filled = 0
        parts = stack.enter_context(contextlib.closing(encoded(corpus, journal["position"], encoding, dtype, workers)))
        for chunk, encodings in parts:
            filled += write_chunk(splits, chunk, encodings, before, after, limit_tokens)
            n_tokens = sum(split.n_tokens for split in splits.values())
            done = n_tokens if limit_tokens else chunk.bytes_read
            progress.update(done - progress.n)
            if limit_tokens and n_tokens >= limit_tokens:
                break
            if filled and chunk.position is not None:
                states = {name: split.state() for name, split in splits.items()}
                work.save({"splits": states, "position": chunk.position, "done": done})
                filled = 0
        return {name: (split.n_tokens, split.n_bytes, split.close()) for name, split in splits.items()}


def write_chunk(splits, chunk, encodings, before, after, limit_tokens):
    """Writes encoded pieces, up to the document that reaches limit_tokens. Returns the number of shards filled."""
    for piece, (ids, n_bytes) in zip(chunk.pieces, encodings, strict=True):
        split = splits[piece.split]
        split.n_bytes += n_bytes
        split.append(*[before] * piece.first, ids, *[after] * piece.last)
        if piece.last:
            split.end_document()
            if limit_tokens and sum(split.n_tokens for split in splits.values()) >= limit_tokens:
                break
    return sum(split.write() for split in splits.values())


def describe(folder, tokenizer, encoding, corpus, documents, counts, extra):
    """Writes meta.json. Returns its entries, and what checks.scan() says of each token file."""
    for name, (n_tokens, n_bytes, _) in counts.items():
        if not n_bytes or n_tokens < 2:
            raise too_little_text(name)
    dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    shards = {name: shards for name, (_, _, shards) in counts.items() if len(shards) > 1}
    paths = {path.name: path for path in sorted(folder.iterdir()) if path.name not in UNLISTED}
    scanned = {name: checks.scan(path, dtype) for name, path in paths.items() if path.suffix == ".bin"}
    meta = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer,
        "vocab_size": encoding.n_vocab,
        "dtype": dtype,
        "tokens": {name: n_tokens for name, (n_tokens, _, _) in counts.items()},
        **({"shards": shards} if shards else {}),
        "bytes": {name: n_bytes for name, (_, n_bytes, _) in counts.items()},  # separators not counted
        "sha256": {name: scanned[name][0] if name in scanned else sha256(path) for name, path in paths.items()},
        "documents": documents,
        **({"validation": corpus.validation} if corpus.validation else {}),
        **extra,
    }
    meta["checksum"] = checksum(meta)
    files.write(folder / "meta.json", json.dumps(meta, indent=2) + "\n")
    return meta, scanned


def too_little_text(split):
    return BadInput(f"too little text for {split}, not even two tokens; give more text or another val_fraction")


def progress_bar(what, total, done=0, unit="B", **options):
    """A bar with the rate and the time left."""
    return tqdm(desc=what, total=total, initial=done, unit=unit, unit_scale=True, disable=None, **options)


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
