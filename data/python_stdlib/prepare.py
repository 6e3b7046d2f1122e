"""Prepares the source code of the standard library of the Python that runs this: 10 to 12 MB, no download.

    python data/python_stdlib/prepare.py [--tokenizer=bpe:4096] [--out_dir=DIR]

A tenth of the files are val, chosen by a hash of the name of their module or package, so that files that resemble each
other, such as the tables of encodings/, stay together. The same version of Python always gives the same dataset.
"""

import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.entry import run_script
from nanoladder.errors import BadInput
from nanoladder.prepare.corpus import Texts, split_documents
from nanoladder.prepare.writer import PrepareParser

# Tests are 19 of 31 MB, much of it data. pydoc_data is the text of help(), 0.8 MB that is not code. site-packages
# (dist-packages on Debian) is not the standard library.
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "pydoc_data", "site-packages", "dist-packages"}
EXCLUDED_PREFIX = "_sysconfigdata"  # files generated when Python is built; they differ on every machine


def read_sources(folder):
    """Returns {path relative to folder: text} of all .py files in UTF-8, sorted by path."""
    sources = {}
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if EXCLUDED_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith(EXCLUDED_PREFIX):
            try:
                sources[relative.as_posix()] = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue  # a handful of files in other encodings
    if not sources:
        raise BadInput(f"no .py files in {folder}: this Python was installed without its sources; run another one")
    return dict(sorted(sources.items()))


def main(argv):
    parser = PrepareParser("Prepares the source code of Python's standard library.", tokenizer="bpe:4096")
    args = parser.parse_args(argv)
    sources = read_sources(Path(sysconfig.get_path("stdlib")))
    modules = [path.partition("/")[0] for path in sources]
    train, val = split_documents(list(sources.values()), val_fraction=0.1, keys=modules)
    extra = {"python_version": platform.python_version(), "files": {"train": len(train), "val": len(val)}}
    parser.write(args, __file__, Texts(train, val), extra=extra)


if __name__ == "__main__":
    run_script(main)
