"""Prepares your own text, of any size: files, and all text files in folders.

    python data/text/prepare.py --input PATH [PATH ...] [--documents=none|lines|files] [--field=text] [--as_text]
                                [--separator=TEXT] [--val_fraction=0.1] [--tokenizer=bpe:4096 | PATH] [--out_dir=DIR]

A file with a JSON object a line holds a document in the field `text` of each, a Parquet file one in the column `text`
of each row; any other file is text, and with --as_text all are. Text and JSON may be compressed by gzip.

--documents=none: one stream, cut into windows anywhere. lines: each line of a text file is a document, such as a name,
and so is each record. files: each text file is a document. `<|endoftext|>`, or --separator, ends a document, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.entry import run_script
from nanoladder.errors import BadInput
from nanoladder.prepare.records import JsonLines, Parquet, Records
from nanoladder.prepare.sources import Files, find_text, kind_of
from nanoladder.prepare.writer import PrepareParser, fraction
from nanoladder.tokenizer.encoding import END_OF_TEXT

RECORDS = {"json": JsonLines, "parquet": Parquet}


def find_paths(inputs, out_dir):
    """Returns {path: True if the path itself is an input, False if it was found in a folder} for all files to read.

    Skips hidden files, files in hidden folders, and files in out_dir, which may be an older dataset.
    """
    files = {}
    for path in map(Path, inputs):
        if not path.exists():
            raise BadInput(f"--input {path}: no such file or folder")
        if path.is_file():
            files[path.resolve()] = path, True
        elif not path.is_dir():
            raise BadInput(f"--input {path}: neither a file nor a folder; a pipe cannot be read twice: make it a file")
        else:
            for file in sorted(path.resolve().rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path.resolve()).parts)
                if file.is_file() and not hidden and file.parent != out_dir.resolve():
                    files.setdefault(file.resolve(), (file, False))
    return dict(files.values())


def find_texts(paths, separator):
    """Returns a TextFile for each nonempty text file. Prints how many are not text, and the number of separators."""
    texts = {path: find_text(path, separator) for path in paths}
    for path, named in paths.items():
        if texts[path] is None and named:
            cure = "convert it (iconv -f UTF-16), decompress it, or remove its zero bytes (tr -d '\\0')"
            raise BadInput(f"--input {path}: not text in UTF-8, or it holds zero bytes; {cure}")
    skipped = list(texts.values()).count(None)
    print(f"files read: {len(texts) - skipped}, skipped because they are not text in UTF-8: {skipped}")
    texts = [text for text in texts.values() if text and text.n_characters]
    if n_separators := sum(text.n_separators for text in texts):
        print(f"{separator!r} ends a document at {n_separators:,} places; --separator= keeps it as text")
    return texts


def open_corpus(args, folder):
    """Returns the corpus that the command line names, all text or all records. folder: the dataset's."""
    paths = find_paths(args.input, folder)
    kinds = {path: "text" if args.as_text else kind_of(path) for path in paths}
    records = [path for path, kind in kinds.items() if kind in RECORDS]
    if not records:
        return Files(find_texts(paths, args.separator), args.documents, args.val_fraction, args.separator)
    if args.documents == "files":
        raise BadInput(f"--documents=files: {records[0]} holds many documents; expected --documents=lines or none")
    for path, kind in kinds.items():
        if kind == "text" and path.stat().st_size:  # an empty file is a mark, such as _SUCCESS
            both = f"{records[0]} holds records, {path} does not"
            raise BadInput(f"--input: {both}; expected one kind: name its files alone; --as_text reads all as text")
    print(f"files read: {len(records)}, of records; a document is the field {args.field!r}")
    sources = [RECORDS[kinds[path]](path) for path in records]
    return Records(sources, args.field, args.val_fraction, args.separator)


def main(argv):
    parser = PrepareParser("Prepares your own text.", tokenizer="bpe:4096")
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, and folders of files")
    parser.add_argument(
        "--documents",
        choices=["none", "lines", "files"],
        default="none",
        help="what becomes a separate document: nothing, each line or each file (default: %(default)s)",
    )
    parser.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field of JSON lines, or column of Parquet files, that holds a document (default: %(default)s)",
    )
    parser.add_argument(
        "--separator",
        default=END_OF_TEXT,
        metavar="TEXT",
        help="ends a document within a file or record, which becomes several; empty: nothing (default: %(default)s)",
    )
    parser.add_argument("--as_text", action="store_true", help="read all files as text, even JSON and tables")
    parser.add_argument(
        "--val_fraction",
        type=fraction,
        default=0.1,
        metavar="F",
        help="part of the documents or files that is val; of a single stream, its end (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    corpus = open_corpus(args, parser.out_dir(args, __file__))
    parser.write(args, __file__, corpus, documents=args.documents != "none")


if __name__ == "__main__":
    run_script(main)
