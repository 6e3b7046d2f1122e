"""Prepares the source code of the packages that requirements.txt pins: 68 MB, two thirds of it PyTorch's.

    python data/python_packages/prepare.py [--tokenizer=bpe:4096] [--out_dir=DIR]

Nothing is downloaded: training needs these packages anyway. Three packages, a twelfth of the text, are val; none of
their files, nor a copy of one, is in train. The same pins always give the same dataset.
"""

import hashlib
import importlib.metadata
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanoladder.entry import run_script
from nanoladder.errors import BadInput
from nanoladder.prepare.corpus import Texts
from nanoladder.prepare.writer import PrepareParser

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
HELD_OUT = {"matplotlib", "tiktoken", "tqdm"}  # whole packages that are val
EXCLUDED_FOLDERS = {"test", "tests"}  # much of it data, as in data/python_stdlib
GENERATED = (  # by a program, or on each machine
    "*/_generated/*",
    "*/generated/*",
    "*/version.py",
    "*/_version.py",
    "matplotlib/_cm*.py",  # tables of colors
    "numpy/__config__.py",
    "pygments/lexers/_*.py",  # word lists
    "torch/_inductor/autoheuristic/artifacts/*",
    "torch/_inductor/fx_passes/serialized_patterns/*",
    "torch/_numpy/_casting_dicts.py",
    "torch/sparse/_triton_ops_meta.py",
    "wandb/proto/*",
)


def read_pins(path):
    """Returns {package: version} of the lines NAME==VERSION of a requirements file."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def read_sources(package, version):
    """Returns {path: text} of a package's .py files in UTF-8, sorted by path, without tests and generated files.

    Raises BadInput if the package is not installed in this version; 2.13.0+cpu is 2.13.0.
    """
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise BadInput(f"{package} is not installed; run `pip install -r requirements.txt`") from None
    if distribution.version.partition("+")[0] != version:
        raise BadInput(
            f"{package} {distribution.version} is installed, but requirements.txt pins {version}, and another version "
            "is another dataset; run `pip install -r requirements.txt`"
        )
    sources = {}
    for path in distribution.files or ():
        generated = any(fnmatch(path.as_posix(), pattern) for pattern in GENERATED)
        if path.suffix == ".py" and not generated and EXCLUDED_FOLDERS.isdisjoint(path.parts):
            sources[path.as_posix()] = Path(path.locate()).read_bytes().decode("utf-8")
    return dict(sorted(sources.items()))


def split_packages(packages):
    """Splits {package: {path: text}} into the texts of train and of val, each file's contents once.

    A copy of a file stays in val only: held-out text must not be trained on.
    """
    seen = set()
    texts = {"val": [], "train": []}
    for split, chosen in (("val", HELD_OUT), ("train", packages.keys() - HELD_OUT)):
        for package in sorted(chosen, key=str.lower):
            for text in packages[package].values():
                digest = hashlib.sha256(text.encode()).digest()
                if text and digest not in seen:
                    seen.add(digest)
                    texts[split].append(text)
    return texts["train"], texts["val"]


def main(argv):
    parser = PrepareParser("Prepares the source code of the packages that requirements.txt pins.", tokenizer="bpe:4096")
    args = parser.parse_args(argv)
    pins = read_pins(REQUIREMENTS)
    train, val = split_packages({package: read_sources(package, version) for package, version in pins.items()})
    extra = {"packages": pins, "held_out": sorted(HELD_OUT), "files": {"train": len(train), "val": len(val)}}
    parser.write(args, __file__, Texts(train, val), extra=extra)


if __name__ == "__main__":
    run_script(main)
