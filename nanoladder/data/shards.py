"""Token files in shards, and the folder in which a dataset grows until it is whole.

A shard is a file of shard_tokens token ids, the last one of fewer. Each time one is full, a journal says how far the
work is. After a kill at any instant the files are cut back to what the journal says, and the work goes on from there:
the result is the same, bit for bit.
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

from nanoladder import files
from nanoladder.data.meta import shard_name
from nanoladder.errors import BadInput

TOKEN_FILE = re.compile(r"(train|val)(_[0-9]{3,})?\.(bin|idx)")
UNFINISHED, JOURNAL, LOCK = ".prepare-unfinished", "journal.json", "lock"


class SplitFiles:
    """The token files of a split while they are written, and for separate documents its index.

    n_tokens, n_bytes (UTF-8, of the text without separators), n_documents: appended so far.
    """

    def __init__(self, folder, name, dtype, shard_tokens, index):
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.n_tokens = self.n_bytes = self.n_documents = 0
        self.waiting = []  # arrays of ids
        self.file = append_to(self.shard(0))
        self.index = append_to(folder / f"{name}.idx") if index else None
        if self.index and not self.index.tell():
            self.index.write(bytes(8))  # the first document begins at 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.open_files():
            file.close()

    def open_files(self):
        return [file for file in (self.file, self.index) if file]

    def shard(self, number):
        return self.folder / shard_name(self.name, number)

    @property
    def n_shards(self):
        """Number of shards, the unfinished one included."""
        return max(1, -(-self.n_tokens // self.shard_tokens))

    def append(self, *parts):
        """Appends arrays of ids, each (n,) of the dtype, which the next write() brings into the files."""
        self.waiting += parts
        self.n_tokens += sum(map(len, parts))

    def write(self):
        """Writes the ids appended since, into the open shard and the next ones. Returns the number of shards filled."""
        ids = np.concatenate([np.empty(0, self.dtype), *self.waiting])
        self.waiting = []
        first = written = self.n_tokens - len(ids)
        while len(ids):
            number, place = divmod(written, self.shard_tokens)
            if place == 0 and number:  # only now that there is more: a split may end with a full shard
                sync(self.file)
                self.file.close()
                self.file = append_to(self.shard(number))
            part, ids = np.split(ids, [self.shard_tokens - place])
            self.file.write(part)
            written += len(part)
        return written // self.shard_tokens - first // self.shard_tokens

    def end_document(self):
        self.n_documents += 1
        if self.index:
            self.index.write(self.n_tokens.to_bytes(8, "little"))

    def state(self):
        """What go_on takes, once everything written is on disk."""
        for file in self.open_files():
            sync(file)
        return [self.n_tokens, self.n_bytes, self.n_documents]

    def go_on(self, state):
        """Cuts the files back to a state. Raises BadInput or OSError if they are shorter."""
        self.n_tokens, self.n_bytes, self.n_documents = state
        self.file.close()
        if (only := self.folder / f"{self.name}.bin").exists():
            os.replace(only, self.shard(0))
        last = self.n_shards - 1
        for path in set(self.folder.glob(f"{self.name}_*.bin")) - {self.shard(number) for number in range(last + 1)}:
            path.unlink()  # begun since
        for number in range(last):
            require_size(self.shard(number), self.shard_tokens * self.dtype.itemsize)
        self.file = cut_back(self.shard(last), (self.n_tokens - last * self.shard_tokens) * self.dtype.itemsize)
        if self.index:
            self.index.close()
            self.index = cut_back(self.folder / f"{self.name}.idx", 8 * (self.n_documents + 1))

    def close(self):
        """Brings everything to disk, under its final name. Returns the number of tokens in each shard."""
        for file in self.open_files():
            sync(file)
            file.close()
        if self.n_shards == 1:
            os.replace(self.shard(0), self.folder / f"{self.name}.bin")
        ends = [min(number * self.shard_tokens, self.n_tokens) for number in range(self.n_shards + 1)]
        return np.diff(ends).tolist()


def require_size(path, size):
    if path.stat().st_size < size:
        raise BadInput(
            f"{path} is shorter than the journal of the unfinished work says; remove the folder {path.parent} and "
            "prepare the dataset from the start"
        )


def cut_back(path, size):
    """Opens a file, cut to that size, to append to it. Raises BadInput or OSError if it is shorter."""
    require_size(path, size)
    os.truncate(path, size)
    return append_to(path)


def append_to(path):
    return open(path, "ab")


def sync(file):
    file.flush()
    os.fsync(file.fileno())


class Unfinished:
    """The folder inside a dataset's own in which it is written. A context manager.

    job: a JSON value that tells this work from any other. journal: what the last call of save() was given, if that was
    for the same job, else None. Without a journal nothing is worth keeping, and leaving removes the folder, and those
    around it that were made for it and hold no dataset.
    Raises BadInput if the dataset's folder holds a run, or another process prepares it.
    """

    def __init__(self, target, job):
        self.target, self.job = Path(target), json.loads(json.dumps(job))
        self.path = self.target / UNFINISHED
        self.journal = None

    def __enter__(self):
        if (self.target / "metrics.jsonl").exists():  # of a run
            raise BadInput(f"{self.target} holds a run, with a tokenizer of its own; expected another --out_dir")
        self.made = [folder for folder in (self.target, *self.target.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = files.hold(self.path / LOCK)
        except BlockingIOError:
            raise BadInput(f"{self.target} is being prepared by another process; wait for its end") from None
        files.remove_temporaries(self.path)
        self.journal = self.load()
        if self.journal is None:
            self.clear()
        return self

    def __exit__(self, *_):
        self.lock.close()
        if not (self.path / JOURNAL).exists():
            shutil.rmtree(self.path)
            with contextlib.suppress(OSError):  # not empty
                for folder in self.made:
                    folder.rmdir()

    def load(self):
        """The journal, if it is of this job."""
        try:
            found = json.loads(files.read(self.path / JOURNAL, limit=2**28))
            if found["job"] == self.job:
                return found["journal"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        print(f"starting over: the unfinished work in {self.path} was of another corpus or with other options")

    def clear(self):
        """Removes everything but the lock."""
        for path in self.path.iterdir():
            if path.name != LOCK:
                path.unlink()

    def save(self, journal):
        """Writes the journal. The files it speaks of are on disk."""
        self.journal = journal
        files.write(self.path / JOURNAL, json.dumps({"job": self.job, "journal": journal}))

    def move_into_place(self, meta):
        """Replaces the dataset in the target folder. Interrupted at any point, it leaves no meta.json beside files of
        another, and can be called again."""
        new = {path.name for path in self.path.iterdir()} - {JOURNAL, LOCK}
        if new:
            (self.target / "meta.json").unlink(missing_ok=True)
            for path in self.target.iterdir():  # the older dataset may have had more shards, or an index
                if TOKEN_FILE.fullmatch(path.name) and path.name not in meta["sha256"]:
                    path.unlink()
        for name in sorted(new, key=lambda name: name == "meta.json"):  # meta.json last
            os.replace(self.path / name, self.target / name)
        files.sync_folder(self.target)
        (self.path / JOURNAL).unlink(missing_ok=True)
