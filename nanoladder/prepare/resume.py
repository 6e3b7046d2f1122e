"""The folder in which a dataset is built until it is complete, and the files of its splits until then.

A journal records progress periodically. After a kill at any instant, the files are truncated to the recorded sizes and
work continues from there: the result is the same, bit for bit.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

from nanoladder import files
from nanoladder.errors import BadInput
from nanoladder.prepare.meta import SPLITS, check, read_own
from nanoladder.tokenizer.encoding import DESCRIPTION, RANKS

UNFINISHED, JOURNAL, LOCK = ".prepare-unfinished", "journal.json", "lock"
META = "meta.json"
DATASET = (*(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")), META, DESCRIPTION, RANKS)
MODEL = ("metrics.jsonl", "config.json", "*.safetensors")  # of a run, or of a model in Hugging Face's format


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

    job: a text that distinguishes this work from any other. overwrite: replace another dataset, or other unfinished
    work. journal: the argument of the last save(), else None. meta: the entries of meta.json if the target folder
    already holds the job's dataset, intact, else None. Exiting removes the folder, unless there is a journal, or the
    dataset is complete and not yet in place.
    Raises BadInput if the target folder holds a run or a model, another dataset or, unless overwrite, unfinished work
    of another job, or if another process is preparing it.
    """

    def __init__(self, target, job, overwrite=False):
        self.target, self.job, self.overwrite = Path(target), job, overwrite
        self.path = self.target / UNFINISHED

    def __enter__(self):
        for path in (path for pattern in MODEL for path in sorted(self.target.glob(pattern))):
            raise BadInput(f"{self.target} holds a model, with its own tokenizer ({path.name}); use another --out_dir")
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = files.hold(self.path / LOCK)
        except BlockingIOError:
            raise BadInput(f"{self.target} is being prepared by another process; wait until it ends") from None
        try:
            self.prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.lock.close()
        if not ((self.path / JOURNAL).exists() or (self.path / META).exists()):
            shutil.rmtree(self.path)

    def prepare(self):
        """Reads the target folder's state, and clears the subfolder unless there is a journal of this job."""
        files.remove_temporaries(self.path)
        if (self.path / META).exists():  # complete, but a kill came while it was moved
            self.move_into_place()
        self.meta = None if self.overwrite else self.find_dataset()
        self.journal = None if self.meta else self.load()
        if self.journal is None:
            for path in self.path.iterdir():
                if path.name != LOCK:
                    path.unlink()

    def find_dataset(self):
        """Returns the meta.json of the target folder's dataset; None if there is none, or it is damaged. Raises
        BadInput if the dataset is not this job's."""
        held = next((name for name in DATASET if os.path.lexists(self.target / name)), None)
        if held is None:
            return None
        meta = {}
        with contextlib.suppress(BadInput):
            meta = read_own(self.target / META)
        if meta.get("job") != self.job:
            raise BadInput(
                f"{self.target} holds a dataset ({held}) of another text, other options or another version, and "
                "models trained on it need its tokenizer; use another --out_dir, or --overwrite to replace it"
            )
        try:
            check(self.target, meta, context_length=0)
        except BadInput as error:
            return print(f"{str(error).rpartition(';')[0]}: preparing it again")
        print(f"{self.target} already holds this text, prepared with these options; --overwrite prepares it again")
        return meta

    def load(self):
        """Returns the journal if it belongs to this job. Raises BadInput if it belongs to another."""
        try:
            saved = json.loads(files.read(self.path / JOURNAL, limit=2**28))
            job, journal = saved["job"], saved["journal"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if job == self.job:
            return journal
        if not self.overwrite:
            raise BadInput(
                f"{self.path} holds unfinished work on another text or with other options; repeat that command to "
                "continue it, use another --out_dir, or --overwrite to discard it"
            )
        return None

    def save(self, journal):
        """Writes the journal. The files that it describes must already be on disk."""
        self.journal = journal
        files.write(self.path / JOURNAL, json.dumps({"job": self.job, "journal": journal}))

    def move_into_place(self):
        """Replaces the dataset in the target folder. If interrupted at any point, leaves no meta.json beside another
        dataset's files, and the next Unfinished of the folder, for any job, completes the move."""
        (self.path / JOURNAL).unlink(missing_ok=True)
        files.sync_folder(self.path)
        new = {path.name for path in self.path.iterdir()} - {LOCK}
        (self.target / META).unlink(missing_ok=True)
        if not json.loads(files.read(self.path / META))["documents"]:  # the older dataset may have had an index
            for split in SPLITS:
                (self.target / f"{split}.idx").unlink(missing_ok=True)
        for name in sorted(new, key=lambda name: name == META):  # meta.json last
            os.replace(self.path / name, self.target / name)
        files.sync_folder(self.target)
