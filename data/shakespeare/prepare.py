"""Prepares tiny Shakespeare, 1.1 MB of plays, with GPT-2's tokenizer.

    python data/shakespeare/prepare.py [--input=FILE] [--tokenizer=gpt2] [--out_dir=DIR]

The last tenth is val, as in nanoGPT.
"""

import hashlib
import http.client
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.entry import run_script
from nanoladder.errors import BadInput
from nanoladder.prepare.corpus import Texts
from nanoladder.prepare.writer import PrepareParser

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def download():
    """Returns the text's bytes. Raises BadInput if there is no network, or the file is not the expected one."""
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise BadInput(f"cannot download {URL} ({reason}); give a copy of the text with --input=FILE") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise BadInput(f"{URL} has changed (another SHA-256); give a copy of the text with --input=FILE")
    return content


def prepare(argv: list[str], script: str, tokenizer: str) -> None:
    """Prepares the text for the dataset whose prepare.py is `script`. tokenizer: the default."""
    parser = PrepareParser("Prepares tiny Shakespeare.", tokenizer)
    parser.add_argument("--input", metavar="FILE", help="a copy of the text (default: download)")
    args = parser.parse_args(argv)
    try:
        text = (Path(args.input).read_bytes() if args.input else download()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--input {args.input}: {getattr(error, 'strerror', 'not text in UTF-8')}") from None
    cut = int(len(text) * 0.9)
    parser.write(args, script, Texts([text[:cut]], [text[cut:]]))


def main(argv):
    prepare(argv, __file__, tokenizer="gpt2")


if __name__ == "__main__":
    run_script(main)
