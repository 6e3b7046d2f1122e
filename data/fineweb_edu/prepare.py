"""Prepares FineWeb-Edu, educational web pages: the sample of 10 billion tokens, streamed from the Hugging Face hub.

    python data/fineweb_edu/prepare.py [--limit_tokens=1e9] [--val_fraction=0.001] [--tokenizer=gpt2] [--out_dir=DIR]

Nothing but the tokens is stored: 20 GB for all of it. If it is interrupted, repeat the command to continue.
The pages whose SHA-256 is lowest, about 0.001 of them, are val.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.openwebtext.prepare import prepare
from nanoladder.entry import run_script

SOURCE = {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}


def main(argv):
    prepare(argv, __file__, "Prepare FineWeb-Edu's sample of 10 billion tokens.", SOURCE, val_fraction=0.001)


if __name__ == "__main__":
    run_script(main)
