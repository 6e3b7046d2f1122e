"""Tokenizers, each a tiktoken.Encoding: GPT-2's, BPE trained on the corpus, characters, bytes.

    encoding = build_tokenizer("bpe:4096", texts)
    ids = encode(encoding, "def main():")
    assert encoding.decode(ids) == "def main():"

encode and save_tokenizer replace tiktoken's own functions, which panic on unknown characters and on a million spaces,
and cache by file name.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

from nanoladder import files
from nanoladder.errors import BadInput, reading

KINDS = "gpt2, bpe:N (N tokens, 257 to 999999999), char or byte"
END_OF_TEXT = "<|endoftext|>"

# BPE merges within pieces of text: words with the character before them, 1-3 digits, punctuation, whitespace.
# This is GPT-4's pattern, as published in tiktoken (tiktoken_ext/openai_public.py, cl100k_base).
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
EVERY_CHARACTER = r"[\s\S]"
# GPT-2's pattern in tiktoken's form (r50k_base), and as first published.
GPT2_PATTERNS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)

LONGEST_RUN = 2**16  # whitespace characters; on a million, the regular expressions of tiktoken and rustbpe fail
WHITESPACE = re.compile(r"\s*")

TEXTS_AT_ONCE = 256  # that rustbpe holds; the writer's are of about a megabyte at most

RANKS, DESCRIPTION = "tokenizer.tiktoken", "tokenizer.json"


def is_name(text: str) -> bool:
    """True for the name of a tokenizer that build_tokenizer knows."""
    bpe = re.fullmatch(r"bpe:([0-9]{1,9})", text)
    return text in ("gpt2", "char", "byte") or (bpe is not None and int(bpe[1]) >= 257)


def build_tokenizer(name: str, texts: Iterable[str] = ()) -> tiktoken.Encoding:
    """Builds the tokenizer of that name.

    name: gpt2 | bpe:N | char | byte. N counts all tokens: 256 bytes, N - 257 merges, and <|endoftext|> last.
    texts: iterable of str. bpe is trained on them, char knows their characters, gpt2 and byte do not read them.
    The same texts give the same tokenizer for any number of threads.
    Raises BadInput for an unknown name, too little text for N, no rustbpe, or if GPT-2's files cannot be downloaded.
    """
    if not is_name(name):
        raise BadInput(f"tokenizer {name!r}: expected {KINDS}, such as bpe:4096")
    if name == "gpt2":
        return download_gpt2()
    if name == "byte":
        return make_encoding(name, EVERY_CHARACTER, [bytes([value]) for value in range(256)])
    if name == "char":
        characters = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise BadInput("tokenizer char: the text is empty, so there are no characters; give it some text")
        return make_encoding(name, EVERY_CHARACTER, [char.encode() for char in sorted(characters)])
    return train_bpe(name, texts)


def train_bpe(name, texts):
    """BPE (Sennrich et al., 2016) over bytes, trained with rustbpe, which nothing else needs."""
    try:
        import rustbpe
    except ImportError:
        raise BadInput(f"tokenizer {name}: needs the package rustbpe; install it (pip install rustbpe)") from None
    vocab_size = int(name.removeprefix("bpe:"))
    trainer, parts = rustbpe.Tokenizer(), (part for text in texts for part in cut_runs(text))
    trainer.train_from_iterator(parts, vocab_size=vocab_size - 1, pattern=GPT4_PATTERN, buffer_size=TEXTS_AT_ONCE)
    tokens = [bytes(token) for token, _ in trainer.get_mergeable_ranks()]  # by rank
    if len(tokens) < vocab_size - 1:
        raise BadInput(
            f"tokenizer {name}: the text has too few pairs to merge for {vocab_size} tokens; "
            f"give it more text, or take a smaller vocabulary: the largest that works is bpe:{len(tokens) + 1}"
        )
    return make_encoding(name, GPT4_PATTERN, tokens, {END_OF_TEXT: len(tokens)})


def download_gpt2():
    """Returns GPT-2's tokenizer (Radford et al., 2019), from tiktoken's cache or the network."""
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: a wrong hash
        raise BadInput(
            f"tokenizer gpt2: its files cannot be downloaded ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a "
            "folder into which tiktoken has downloaded them, or take another tokenizer"
        ) from None


def make_encoding(name, pattern, tokens, special_tokens=None):
    """Makes a tiktoken.Encoding. tokens: list of bytes in rank order, or {bytes: rank}; a token's rank is its id."""
    return tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=tokens if isinstance(tokens, dict) else {token: rank for rank, token in enumerate(tokens)},
        special_tokens=special_tokens or {},
        explicit_n_vocab=len(tokens) + len(special_tokens or {}),
    )


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Returns a list of the text's ids, each in [0, encoding.n_vocab). `<|endoftext|>` in it is ordinary text.

    Raises BadInput for a character that a char tokenizer does not know.
    """
    check_characters(encoding, text)
    return [token for part in cut_runs(text) for token in encoding.encode_ordinary(part)]


def cut_runs(text: str) -> Iterator[str]:
    """Yields the parts of a text, at least one: whitespace is cut after every LONGEST_RUN characters in a row.

    Every encoding begins here, so the same text gives the same ids everywhere.
    """
    start = 0
    for place in range(LONGEST_RUN, len(text), LONGEST_RUN):  # a longer run covers one of these places
        if text[place].isspace():
            first = start + len(text[start:place].rstrip())
            for cut in range(first + LONGEST_RUN, WHITESPACE.match(text, place).end(), LONGEST_RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]


def check_characters(encoding: tiktoken.Encoding, text: str) -> None:
    """Raises BadInput for a character that a char tokenizer does not know: tiktoken would panic."""
    if encoding.name != "char":
        return
    known = encoding._mergeable_ranks
    unknown = [character for character in sorted(set(text)) if character.encode(errors="surrogatepass") not in known]
    if unknown:
        place = text.index(unknown[0])
        names = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in unknown[:9])
        raise BadInput(
            f"{names}{' ...' * (len(unknown) > 9)}: not among the {len(known)} characters of the char tokenizer; "
            f"the first is in {text[max(0, place - 20) : place + 20]!r}: leave them out or use another tokenizer"
        )


def end_of_text(encoding: tiktoken.Encoding) -> int | None:
    """The id of `<|endoftext|>`; None if the tokenizer has no such token (char, byte)."""
    return encoding.encode_single_token(END_OF_TEXT) if END_OF_TEXT in encoding.special_tokens_set else None


def first_token(encoding: tiktoken.Encoding) -> int:
    """The id that begins a new document: `<|endoftext|>`, as in the training data, or 0 if there is no such token."""
    return end_of_text(encoding) or 0


def rank_lines(encoding):
    """The bytes of tokenizer.tiktoken, in tiktoken's format: base64 of the token, space, rank."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks)


def identify(encoding: tiktoken.Encoding | None) -> dict[str, str]:
    """Returns {"sha256": digest of tokens and ids}; {} for None. Equal digests mean the same tokenizer to a model."""
    return {"sha256": hashlib.sha256(rank_lines(encoding)).hexdigest()} if encoding else {}


def description(encoding: tiktoken.Encoding) -> dict:
    """Returns the contents of tokenizer.json, all of a tokenizer but its ranks, unsealed."""
    return {
        "name": encoding.name,
        "pattern": encoding._pat_str,  # underscored, yet tiktoken's documented way to build on an encoding
        "special_tokens": encoding._special_tokens,
        "vocab_size": encoding.n_vocab,
    }


def save_tokenizer(encoding: tiktoken.Encoding, folder: Path | str) -> None:
    """Writes tokenizer.tiktoken and tokenizer.json, each tied to the other by a digest."""
    lines = rank_lines(encoding)
    described = files.seal(description(encoding), lines)
    files.write(Path(folder) / RANKS, lines)
    files.write(Path(folder) / DESCRIPTION, json.dumps(described, indent=2) + "\n")


def load_tokenizer(folder: Path | str) -> tiktoken.Encoding:
    """Loads a tokenizer written by save_tokenizer. Raises BadInput if a file is missing, damaged or foreign."""
    advice = "prepare the dataset again; for a run, copy both files from its dataset's folder"
    with reading(f"tokenizer in {folder} cannot be read", advice):
        described = json.loads(files.read(Path(folder) / DESCRIPTION))
        lines = files.read(Path(folder) / RANKS, limit=2**26)
        if files.seal(described, lines) != described:
            raise ValueError(f"{DESCRIPTION} or {RANKS} was changed since they were written together")
        tokens = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines.splitlines())}
        return make_encoding(described["name"], described["pattern"], tokens, described["special_tokens"])
