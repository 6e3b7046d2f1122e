"""Tokenizers in Hugging Face's format, tokenizer.json: written from a tiktoken.Encoding, and read into one.

Both encode every text to the same ids. tiktoken ranks the tokens and merges the pair of lowest rank; Hugging Face
lists the pairs to merge. A token's only possible pair is the last one left when the token itself is merged by lower
ranks, so ranks and merges determine each other.

Any of our tokenizers can be written. These can be read, and so can byte-level BPE with GPT-2's pattern, which nearly
every GPT-2 uses. One with which transformers encodes otherwise, such as with a token before each text, is refused. The
package tokenizers is not needed, only JSON.
"""

import json
import math
import os
from itertools import pairwise
from pathlib import Path

import tiktoken

from nanoladder import files
from nanoladder.errors import reading
from nanoladder.tokenizer.encoding import EVERY_CHARACTER, GPT2_PATTERNS, GPT4_PATTERN

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

# Oniguruma, Hugging Face's regex engine, reads {1,3}+ as {1,3} repeated, tiktoken's as a possessive quantifier, whose +
# has no effect here.
GPT4_ONIGURUMA = GPT4_PATTERN.replace("{1,3}+", "{1,3}")


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex):
    """Writes each byte as a character; with use_regex, cuts the text by GPT-2's pattern first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


PRE_TOKENIZERS = {  # by tiktoken's pattern
    GPT4_PATTERN: {"type": "Sequence", "pretokenizers": [split(GPT4_ONIGURUMA), byte_level(use_regex=False)]},
    EVERY_CHARACTER: byte_level(use_regex=False),  # for single bytes, which nothing merges
    **dict.fromkeys(GPT2_PATTERNS, byte_level(use_regex=True)),
}
CHARACTERS = split(EVERY_CHARACTER)  # for a char tokenizer
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}  # a token


def byte_alphabet():
    """Returns GPT-2's {byte: character}: printable bytes stand for themselves, the others are shifted past 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


ALPHABET = byte_alphabet()
BYTES = {character: byte for byte, character in ALPHABET.items()}


def last_pair(token, ranks):
    """Returns the two parts, bytes, that merge into a token; None if no merge makes it, as for a single byte."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
        lowest = min(pairs)
        if lowest == math.inf:
            return None
        i = pairs.index(lowest)  # the leftmost, as both libraries choose
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts) if len(parts) == 2 else None


def merges_of(ranks):
    """Returns [(left, right)] for all tokens made by merges, in the order of their ranks. ranks: {token: rank}."""
    pairs = (last_pair(token, ranks) for token in sorted(ranks, key=ranks.get))
    return [pair for pair in pairs if pair]


# -- writing


def to_huggingface(encoding: tiktoken.Encoding) -> dict:
    """Returns the contents of a tokenizer.json, a dict, that encodes exactly as the tiktoken.Encoding does.

    An unknown character is an error there too. `<|endoftext|>` is a special token: transformers reads it in a text as
    that token, or as ordinary text with split_special_tokens=True.
    """
    ranks = encoding._mergeable_ranks
    if encoding.name == "char":
        vocab = {token.decode(): rank for token, rank in ranks.items()}
        unknown = "<unknown>"  # not in the vocabulary
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": unknown}
        pre_tokenizer, decoder = CHARACTERS, {"type": "Fuse"}
    else:
        model = {
            "type": "BPE",
            "ignore_merges": True,  # a piece of text that is a token becomes it, as in tiktoken
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [" ".join(map(spell, pair)) for pair in merges_of(ranks)],
        }
        pre_tokenizer, decoder = PRE_TOKENIZERS[encoding._pat_str], byte_level(use_regex=True)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": content, **SPECIAL} for content, number in encoding._special_tokens.items()
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def spell(token):
    """Spells bytes in characters of the byte alphabet."""
    return "".join(ALPHABET[byte] for byte in token)


# -- reading


def from_huggingface(folder):
    """Reads a tokenizer.json into a tiktoken.Encoding, whose name is char or huggingface.

    Raises BadInput if there is none, it is damaged, or tiktoken cannot encode every text to the same ids.
    """
    path, options = Path(folder) / TOKENIZER, Path(folder) / TOKENIZER_CONFIG
    with reading(f"tokenizer {path} cannot be read", "expected the byte-level BPE of a GPT-2"):
        if os.path.lexists(options):
            require_plain(json.loads(files.read(options)))
        return parse(json.loads(files.read(path, limit=2**27)))


def require_plain(options):
    """Raises ValueError if a tokenizer_config.json says that transformers encodes otherwise than tokenizer.json."""
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space"):
        if options.get(name):
            raise ValueError(f"its {TOKENIZER_CONFIG} sets {name}")
    if added := ordinary(options.get("added_tokens_decoder", {}).values()):
        raise ValueError(f"its {TOKENIZER_CONFIG} adds the token {added[0]!r:.40}")


def ordinary(added):
    """Returns the texts of the added tokens that are no mere special tokens: they are found in ordinary text."""
    ways = ("lstrip", "rstrip", "single_word")
    return [token["content"] for token in added if not token.get("special") or any(token.get(way) for way in ways)]


def affixes(processor):
    """Returns the part of a post_processor that puts tokens around a text; None if there is none."""
    if not processor or processor["type"] == "ByteLevel":  # which moves offsets
        return None
    if processor["type"] == "Sequence":
        return next(filter(None, map(affixes, processor["processors"])), None)
    if processor["type"] == "TemplateProcessing" and [[*piece] for piece in processor["single"]] == [["Sequence"]]:
        return None
    return processor


def parse(content):
    """Makes an Encoding of the contents of a tokenizer.json. Raises ValueError if no Encoding gives the same ids."""
    parts = essence(content)
    special = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    vocab = {token: number for token, number in content["model"]["vocab"].items() if token not in special}
    if parts["type"] == "WordLevel":
        name, pattern, ranks = "char", EVERY_CHARACTER, {token.encode(): number for token, number in vocab.items()}
    else:
        name, pattern = "huggingface", pattern_of(parts)
        made = {merge.replace(" ", "", 1) for merge in parts["merges"]} | BYTES.keys()
        if not content["model"].get("ignore_merges"):  # then a token that no merge makes never occurs
            special |= {token: number for token, number in vocab.items() if token not in made}
        spelled = {token: number for token, number in vocab.items() if token not in special}
        ranks = {bytes(BYTES[character] for character in token): number for token, number in spelled.items()}
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ValueError(f"it has no token for byte {missing[0]}")
    if sorted([*ranks.values(), *special.values()]) != list(range(len(ranks) + len(special))):
        raise ValueError("its ids have gaps or duplicates")
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    for part, expected in essence(to_huggingface(encoding)).items():
        if parts[part] != expected:
            raise ValueError(f"its {part}: {json.dumps(parts[part]):.100}; expected {json.dumps(expected):.100}")
    return encoding


def essence(content):
    """Returns {part: value} of everything in a tokenizer.json, besides the vocabulary, that affects a text's ids."""
    model, cut = content["model"], content["pre_tokenizer"]
    if cut and cut["type"] == "ByteLevel":
        cut = {**byte_level(use_regex=True), **cut, "trim_offsets": True}  # offsets are not used here
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return {
        "type": model.get("type", "BPE"),
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": cut,
        "post_processor": affixes(content.get("post_processor")),
        "ordinary added_tokens": ordinary(content.get("added_tokens", [])),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])],
        **{option: model.get(option) or None for option in options},
    }


def pattern_of(parts):
    """Returns the tiktoken pattern that cuts a text as a tokenizer.json with this essence does."""
    for pattern, cut in PRE_TOKENIZERS.items():
        if cut == parts["pre_tokenizer"] and not (pattern == EVERY_CHARACTER and parts["merges"]):
            return pattern
    raise ValueError(f"its pre_tokenizer: {json.dumps(parts['pre_tokenizer']):.200}")
