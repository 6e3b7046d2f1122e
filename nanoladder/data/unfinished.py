"""The folder in which a dataset is built until it is complete, and the files of its splits until then.

A journal records progress periodically. After a kill at any instant, the files are truncated to the recorded sizes and
work continues from there: the result is the same, bit for bit.
"""

import json
import os
import shutil
from pathlib import Path

from nanoladder import files
from nanoladder.data.meta import SPLITS
from nanoladder.errors import BadInput

UNFINISHED, JOURNAL, LOCK = ".prepare-unfinished", "journal.json", "lock"


class SplitFiles:
    """The files of a split being written: token ids and, for separate documents, the place at which each begins.

    counts: tokens, bytes (UTF-8, of the text without separators) and documents so far.
    """

    def __init__(self, folder, name, itemsize, documents, counts=None):
        self.counts = counts or {"tokens": 0, "bytes": 0, "documents": 0}
        self.ids = open_cut_back(folder / f"{name}.bin", itemsize * self.counts["tokens"])
        self.index = None
        if documents:
            self.index = open_cut_back(folder / f"{name}.idx", 8 * (self.counts["documents"] + 1) if counts else 0)
            if not counts:
                self.index.write(bytes(8))  # the first document begins at 0

    def append(self, piece, ids, n_bytes, before, after):
        """Appends a piece's ids, with `before` at a document's start and `after` at its end; all (n,) of the dtype."""
        for part in (before if piece.first else before[:0], ids, after if piece.last else after[:0]):
            self.ids.write(part)
            self.counts["tokens"] += len(part)
        self.counts["bytes"] += n_bytes
        if piece.last:
            self.counts["documents"] += 1
            if self.index:
                self.index.write(self.counts["tokens"].to_bytes(8, "little"))

    def sync(self):
        """Syncs everything to disk. Returns the counts."""
        for file in filter(None, (self.ids, self.index)):
            file.flush()
            os.fsync(file.fileno())
        return self.counts

    def close(self):
        for file in filter(None, (self.ids, self.index)):
            file.close()


def open_cut_back(path, size):
    """Truncates a file to `size` and opens it for appending. Raises BadInput if it is shorter."""
    file = open(path, "ab", buffering=2**20)  # noqa: SIM115 SplitFiles closes it
    if file.tell() < size:
        file.close()
        raise BadInput(f"{path} is shorter than the journal says; remove the folder {path.parent} and start over")
    file.truncate(size)
    return file


class Unfinished:
    """The subfolder of a dataset's folder in which it is written. A context manager.

    job: a JSON value that distinguishes this work from any other. journal: the argument of the last save(), if it was
    for the same job, else None. If there is no journal, exiting removes the folder.
    Raises BadInput if the dataset's folder holds a run, or if another process is preparing it.
    """

    def __init__(self, target, job):
        self.target, self.job = Path(target), json.loads(json.dumps(job))
        self.path = self.target / UNFINISHED

    def __enter__(self):
        if (self.target / "metrics.jsonl").exists():  # of a run
            raise BadInput(f"{self.target} holds a run, with its own tokenizer; expected another --out_dir")
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = files.hold(self.path / LOCK)
        except BlockingIOError:
            raise BadInput(f"{self.target} is being prepared by another process; wait until it ends") from None
        files.remove_temporaries(self.path)
        self.journal = self.load()
        if self.journal is None:
            for path in self.path.iterdir():
                if path.name != LOCK:
                    path.unlink()
        return self

    def __exit__(self, *_):
        self.lock.close()
        if not (self.path / JOURNAL).exists():
            shutil.rmtree(self.path)

    def load(self):
        """Returns the journal if it belongs to this job."""
        try:
            found = json.loads(files.read(self.path / JOURNAL, limit=2**28))
            if found["job"] == self.job:
                return found["journal"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        print(f"starting over: the unfinished work in {self.path} was for another corpus or with other options")

    def save(self, journal):
        """Writes the journal. The files that it describes must already be on disk."""
        self.journal = journal
        files.write(self.path / JOURNAL, json.dumps({"job": self.job, "journal": journal}))

    def move_into_place(self, meta):
        """Replaces the dataset in the target folder. If interrupted at any point, leaves no meta.json beside another
        dataset's files, and the work starts over."""
        (self.path / JOURNAL).unlink(missing_ok=True)
        files.sync_folder(self.path)
        new = {path.name for path in self.path.iterdir()} - {LOCK}
        (self.target / "meta.json").unlink(missing_ok=True)
        if not meta["documents"]:  # the older dataset may have had an index
            for split in SPLITS:
                (self.target / f"{split}.idx").unlink(missing_ok=True)
        for name in sorted(new, key=lambda name: name == "meta.json"):  # meta.json last
            os.replace(self.path / name, self.target / name)
        files.sync_folder(self.target)
