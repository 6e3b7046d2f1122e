"""Measures what a large corpus costs: python -m lab.corpora [--megabytes=300]

Encodes the source code of Python's standard library, over and over as documents of 4,000 characters in a .jsonl: with
tiktoken on one thread, then as data/text/prepare.py does, on all cores, with reading, cutting and writing. Then opens a
dataset of a billion tokens and cuts its first batch. Prints Markdown. A file in the page cache is read from there.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch
from nanoladder.entry import Parser, run_script

import torch

from lab.limits import describe
from nanoladder.config import Config
from nanoladder.data import TrainingBatches, checks, encode, open_dataset, writer
from nanoladder.data.encode import n_cores
from nanoladder.data.meta import FORMAT_VERSION, checksum, read_meta, shard_name
from nanoladder.data.sources import Files, find_file
from nanoladder.data.tokenizer import build_tokenizer, load_tokenizer, save_tokenizer
from nanoladder.machine import peak_memory_gb, proc_bytes

CPU = torch.device("cpu")
TOKENIZER, SAMPLE = "bpe:16384", 4000  # characters of a document
ROUNDS = 5  # of each measurement; the median counts
BATCH = {"batch_size": 480, "context_length": 1024}  # that of config/gpt2.py
N_SHARDS, SHARD = 10, 100_000_000  # a billion tokens


def main(argv):
    parser = Parser(prog="python -m lab.corpora", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=300, help="of text to prepare (default: %(default)s)")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FOLDER"), help="one measurement, printed as JSON")
    options = parser.parse_args(argv)
    if options.part:
        name, folder = options.part
        print(json.dumps(PARTS[name](Path(folder))))
        return
    found = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="corpora-") as folder:
        write_texts(Path(folder), options.megabytes)
        for name in list(PARTS) * ROUNDS:  # in turn, each in a process of its own
            command = [sys.executable, "-m", "lab.corpora", "--part", name, folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress is shown
            if done.returncode:
                sys.exit(done.returncode)
            for key, value in json.loads(done.stdout).items():
                found[key].append(value)
    print(table({key: statistics.median(values) for key, values in found.items()}, options.megabytes))


def table(found, megabytes):
    """Returns the measurements as Markdown."""
    gain = found["prepare"] / found["tiktoken"]
    return (
        f"{describe(CPU)['cpu']}, {n_cores()} cores; {megabytes} MB of text, {TOKENIZER}, medians of "
        f"{ROUNDS}.\n\n| | |\n| --- | --- |\n"
        f"| tiktoken on one thread, `encode_ordinary` | {found['tiktoken']:.1f} MB/s |\n"
        f"| preparing, from .jsonl to token files | {found['prepare']:.1f} MB/s, {gain:.2f}× |\n"
        f"| peak resident memory of preparing, all processes | {found['prepare_peak']:.2f} GB, "
        f"{found['prepare_before']:.2f} GB of it Python and PyTorch |\n"
        f"| a dataset of a billion tokens, opened | {found['opened']:.2f} s |\n"
        f"| and its first batch, {BATCH['batch_size']} × {BATCH['context_length']}, cut | {found['cut']:.2f} s, "
        f"{1e3 * found['cut_memory']:.0f} MB more than Python and PyTorch |"
    )


def write_texts(folder, megabytes):
    """Writes a tokenizer, the texts as text.json and, over and over up to so many megabytes, as corpus.jsonl."""
    sources = [path.read_text("utf-8", "ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    texts = [source[i : i + SAMPLE] for source in sources for i in range(0, len(source), SAMPLE)]
    save_tokenizer(build_tokenizer(TOKENIZER, sources), folder)
    (folder / "text.json").write_text(json.dumps(texts))
    lines, size = "".join(json.dumps({"text": text}) + "\n" for text in texts), utf8_bytes(texts)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for _ in range(max(1, round(megabytes * 1e6 / size))):
            file.write(lines)


def tiktoken_alone(folder):
    """Returns the megabytes of text a second of tiktoken on one thread."""
    texts, encoding = json.loads((folder / "text.json").read_text()), load_tokenizer(folder)
    took = seconds(lambda: [encoding.encode_ordinary(text) for text in texts])
    return {"tiktoken": utf8_bytes(texts) / 1e6 / took}


def preparing(folder):
    """Returns the megabytes of text a second of preparing, and the peak of resident memory in GB, all processes'."""
    encoding, before, metas, peaks = load_tokenizer(folder), peak_memory_gb(CPU), [], []

    class Watched(encode.Worker):
        def __exit__(self, *error):
            with contextlib.suppress(OSError):  # no /proc
                peaks.append(proc_bytes(f"/proc/{self.process.pid}/status", "VmHWM") / 1e9)
            super().__exit__(*error)

    with (
        tempfile.TemporaryDirectory(dir=folder) as out,
        patch.object(writer, "build_tokenizer", lambda *_: encoding),
        patch.object(encode, "Worker", Watched),
    ):

        def prepare():
            corpus = Files([find_file(folder / "corpus.jsonl")], val_fraction=0.01)
            metas.append(writer.write_corpus(Path(out), corpus, TOKENIZER))

        took = seconds(prepare)
    n_bytes = sum(metas[0]["bytes"].values())
    peak = peak_memory_gb(CPU) + sum(peaks)
    return {"prepare": n_bytes / 1e6 / took, "prepare_before": before, "prepare_peak": peak}


def opening(folder):
    """Returns the seconds to open a billion tokens and to cut the first batch, and the memory it takes in GB."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    files = {"train": [shard_name("train", number) for number in range(N_SHARDS)], "val": ["val.bin"]}
    for names, size in zip(files.values(), (2 * SHARD, 2_000_000), strict=True):
        for name in names:
            with open(folder / name, "wb") as file:
                file.truncate(size)  # zeros that take no disk
    scanned = {names[0]: checks.scan(folder / names[0], "uint16") for names in files.values()}
    scanned = {name: scanned[names[0]] for names in files.values() for name in names}
    meta = {"format_version": FORMAT_VERSION, "tokenizer": "byte", "vocab_size": 256, "dtype": "uint16"}
    meta |= {"tokens": {"train": N_SHARDS * SHARD, "val": 10**6}, "bytes": {"train": 1, "val": 1}, "documents": False}
    meta |= {"shards": {"train": [SHARD] * N_SHARDS}, "sha256": {name: facts[0] for name, facts in scanned.items()}}
    (folder / "meta.json").write_text(json.dumps({**meta, "checksum": checksum(meta)}))
    checks.remember(folder, read_meta(folder, 0), scanned)  # as the writer does
    before, batches = peak_memory_gb(CPU), []
    config = Config(dataset=str(folder), **BATCH)
    opened = seconds(lambda: batches.append(TrainingBatches(open_dataset(config).train, config)))
    cut = seconds(lambda: batches[0][1])
    return {"opened": opened, "cut": cut, "cut_memory": peak_memory_gb(CPU) - before}


def utf8_bytes(texts):
    return sum(len(text.encode()) for text in texts)


def seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


PARTS = {"tiktoken": tiktoken_alone, "preparing": preparing, "opening": opening}

if __name__ == "__main__":
    run_script(main)
