"""Reports to rank 0 from the background of training: through torchrun's store, because collectives belong to steps."""

import itertools
import time
from collections.abc import Callable

from nanoladder.parallel import group
from nanoladder.parallel.division import sizes
from nanoladder.parallel.mesh import mesh

PAUSE = 0.05  # seconds between two looks of rank 0 at how many have reported
LONG_PAUSE = 0.5  # and of all others at whether it has finished


def holder() -> int | None:
    """Number of this process among those that hold one copy of the model; None if it holds another copy."""
    (copy, shard), (_, n_shards, n_tensor) = mesh().copy_and_shard, sizes()
    return None if copy else (mesh().place.pipeline * n_shards + shard) * n_tensor + mesh().place.tensor


class Reports:
    """One text from each holder to rank 0, which then says that it has finished.

    All processes make a Reports at the same point of a run.
    """

    numbers = itertools.count()

    def __init__(self) -> None:
        self.key = f"reports {next(self.numbers)}"

    def send(self, text: str) -> None:
        """Sends this holder's text."""
        group.STORE.set(f"report {holder()}", text)
        group.STORE.add(self.key, 1)

    def wait(self, n: int, ended: Callable[[], bool]) -> list[str] | None:
        """Returns the texts of n holders, by number, once all are there; None if ended() returns True before."""
        while group.STORE.add(self.key, 0) < n:
            if ended():
                return None
            time.sleep(PAUSE)
        return [text.decode() for text in group.STORE.multi_get([f"report {number}" for number in range(n)])]

    def finish(self) -> None:
        """Says that rank 0 has finished."""
        group.STORE.add(f"{self.key} done", 1)

    def wait_for_first(self) -> None:
        """Waits until rank 0 has finished. Not a collective, whose time limit it might exceed."""
        while not group.STORE.add(f"{self.key} done", 0):
            time.sleep(LONG_PAUSE)
