"""Prepares your own text: files, and all text files in folders.

    python data/text/prepare.py --input PATH [PATH ...] [--documents=none|lines|files] [--val_fraction=0.1]
                                [--tokenizer=bpe:4096] [--out_dir=DIR]

--documents=none: one stream, cut into windows anywhere. lines: each line is a document, such as a name. files: each
file is a document. All of the text is held in memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.data.writer import PrepareParser, fraction, split_documents, split_text, summary, write_dataset
from nanoladder.entry import run_script
from nanoladder.errors import BadInput


def find_files(inputs, out_dir):
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
                files.setdefault(file, False)
    return files


def read_text(path):
    """The text of a file; None if it is not UTF-8 or holds zero bytes."""
    content = path.read_bytes()
    try:
        return None if b"\0" in content else content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def read_texts(files):
    """The texts of the files that are not empty, and the number of files skipped because they are not text."""
    texts, skipped = [], 0
    for path, named in files.items():
        try:
            text = read_text(path)
        except OSError as error:
            raise BadInput(f"--input {path}: {error.strerror}") from None
        if text is None and named:
            raise BadInput(f"--input {path}: not text in UTF-8; convert it first, for example with iconv")
        if text is None:
            skipped += 1
        elif text:
            texts.append(text)
    return texts, skipped


def lines_of(texts):
    """All lines that are not blank, without their line ends."""
    return [line.rstrip("\r") for text in texts for line in text.split("\n") if line.strip()]


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
        "--val_fraction",
        type=fraction,
        default=0.1,
        metavar="F",
        help="part of the documents or files that is val; of a single stream, its end (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    folder = parser.out_dir(args, __file__)
    files = find_files(args.input, folder)
    texts, skipped = read_texts(files)
    print(f"files read: {len(files) - skipped}, skipped because they are not text in UTF-8: {skipped}")
    if args.documents == "lines":
        texts = lines_of(texts)
    if args.documents == "none" and len(texts) == 1:
        train, val = split_text(texts[0], args.val_fraction)
    else:
        train, val = split_documents(texts, args.val_fraction)
    meta = write_dataset(folder, train, val, args.tokenizer, documents=args.documents != "none")
    print(summary(folder, meta))


if __name__ == "__main__":
    run_script(main)
