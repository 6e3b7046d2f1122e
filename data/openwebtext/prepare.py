"""Prepares OpenWebText, 8 million web pages, 9 billion of GPT-2's tokens, streamed from the Hugging Face hub.

    python data/openwebtext/prepare.py [--limit_tokens=1e9] [--val_fraction=0.0005] [--tokenizer=gpt2] [--out_dir=DIR]

Nothing but the tokens is stored: 18 GB for all of it. If it is interrupted, repeat the command to continue.
The pages whose SHA-256 is lowest, about 0.0005 of them, are val.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.entry import run_script
from nanoladder.errors import BadInput
from nanoladder.prepare.records import Records, Stream
from nanoladder.prepare.writer import PrepareParser, fraction


def prepare(argv: list[str], script: str, description: str, arguments: dict, val_fraction: float) -> None:
    """Prepares a Hugging Face hub dataset in the folder whose prepare.py is `script`.

    arguments: dict of arguments for datasets.load_dataset. val_fraction: the option's default.
    """
    parser = PrepareParser(description, tokenizer="gpt2")
    parser.add_argument(
        "--limit_tokens",
        type=float,
        metavar="N",
        help="stop after the document that reaches this number of tokens, such as 1e9 (default: all)",
    )
    parser.add_argument(
        "--val_fraction",
        type=fraction,
        default=val_fraction,
        metavar="F",
        help="part of the documents that is val (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.tokenizer == "char":
        raise BadInput("--tokenizer=char has to read everything first; expected gpt2, byte or bpe:N")
    corpus = Records([Stream(arguments)], val_fraction=args.val_fraction)
    parser.write(args, script, corpus, extra={"source": arguments}, limit_tokens=args.limit_tokens)


def main(argv):
    prepare(argv, __file__, "Prepare OpenWebText.", {"path": "Skylion007/openwebtext"}, val_fraction=0.0005)


if __name__ == "__main__":
    run_script(main)
