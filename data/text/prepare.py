"""Prepares your own text, of any size: files, and all text files in folders.

    python data/text/prepare.py --input PATH [PATH ...] [--documents=none|lines|files] [--field=text]
                                [--val_fraction=0.1] [--tokenizer=bpe:4096] [--shard_tokens=100M] [--out_dir=DIR]

A .jsonl file holds a document in the field `text` of each line, a .parquet file one in the column `text` of each row;
any other file is text. All but .parquet may be compressed, .gz or .zst.

--documents=none: one stream, cut into windows anywhere. lines: each line of a text file is a document, such as a name,
and so is each line of a .jsonl and each row of a .parquet file. files: each text file is a document.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.entry import run_script

from nanoladder.data.sources import Files, find_file, kind_of
from nanoladder.data.writer import PrepareParser, fraction, summary, write_corpus
from nanoladder.errors import BadInput


def find_paths(inputs, out_dir):
    """{path: True if the path itself is an input, False if it was found in a folder} of all files to read.

    Leaves out hidden files, files in hidden folders, and those in out_dir, which may be an older dataset.
    """
    files = {}
    for path in map(Path, inputs):
        if not path.exists():
            raise BadInput(f"--input {path}: no such file or folder")
        if not path.is_dir():
            files[path.resolve()] = True
            continue
        for file in sorted(path.resolve().rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path.resolve()).parts)
            if file.is_file() and not hidden and file.parent != out_dir.resolve():
                files.setdefault(file.resolve(), False)
    return files


def find_files(paths):
    """The files that are not empty, each a File, and the number of those skipped because they are not text."""
    files, skipped = [], 0
    for path, named in paths.items():
        file = find_file(path)
        if file is None and named:
            raise BadInput(f"--input {path}: not text in UTF-8; convert it first, for example with iconv")
        if file is None:
            skipped += 1
        elif file.n_characters or not file.sha256:
            files.append(file)
    return files, skipped


def main(argv):
    parser = PrepareParser("Prepare your own text.", tokenizer="bpe:4096")
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, and folders of files")
    parser.add_argument(
        "--documents",
        choices=["none", "lines", "files"],
        default="none",
        help="what is a document of its own: nothing, each line or each file (default: %(default)s)",
    )
    parser.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field of a .jsonl, or column of a .parquet file, that holds a document (default: %(default)s)",
    )
    parser.add_argument(
        "--val_fraction",
        type=fraction,
        default=0.1,
        metavar="F",
        help="part of the documents or files that is val; of a single stream, its end (default: %(default)s)",
    )
    parser.add_shard_tokens()
    args = parser.parse_args(argv)
    folder = parser.out_dir(args, __file__)
    paths = find_paths(args.input, folder)
    files, skipped = find_files(paths)
    for file in files:
        if args.documents == "files" and kind_of(file.path)[0] != "text":
            raise BadInput(f"--documents=files: {file.path} holds many documents; expected --documents=lines or none")
    print(f"files read: {len(paths) - skipped}, skipped because they are not text in UTF-8: {skipped}")
    corpus = Files(files, args.field, args.documents == "lines", args.val_fraction, cut=args.documents == "none")
    separate = args.documents != "none"
    meta = write_corpus(folder, corpus, args.tokenizer, documents=separate, shard_tokens=args.shard_tokens)
    print(summary(folder, meta))


if __name__ == "__main__":
    run_script(main)
