"""Prepares tiny Shakespeare, 1.1 MB of plays, with one token for each of its 65 characters.

    python data/shakespeare_char/prepare.py [--input=FILE] [--tokenizer=char] [--out_dir=DIR]

The last tenth is val, as in nanoGPT.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.shakespeare.prepare import prepare
from nanoladder.entry import run_script


def main(argv):
    prepare(argv, __file__, tokenizer="char")


if __name__ == "__main__":
    run_script(main)
