"""Heartbeats: every process says periodically where it is. If one falls silent, the others end, and a line names it.

A thread of each process writes a beat to torchrun's store every few seconds; rank 0's thread reads all beats, the
others read rank 0's. So a beat costs two messages, to one place, and no process waits for it. The beats go on while the
main thread computes, compiles or waits for a message, but not in a process that is stopped or on a node that is gone.
"""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PERIOD = 5.0  # seconds between beats, at most
GRACE = 20.0  # seconds of silence that end a run which got a signal: torchrun kills its processes after 30
END, LEAVING, ALL = "end", "leaving", "all"  # keys of the store: not empty if all must end; how many leave; if all do
NAMED = 4  # processes that the line names
CODE = Path(__file__).parents[2]  # the repository

heart: "Heart | None" = None  # this process's, None if it is alone


class Heart(threading.Thread):
    """Thread that beats, and ends this process if another one is silent.

    store: torchrun's, over a connection of its own. limit: seconds of silence that end the run, math.inf for none.
    """

    def __init__(self, store, rank, world_size, limit):
        super().__init__(name="heartbeat", daemon=True)
        self.store, self.rank, self.world_size, self.limit = store, rank, world_size, limit
        self.period = min(PERIOD, self.limit / 8)
        self.watched = range(world_size) if rank == 0 else range(1)
        self.beats = dict.fromkeys(self.watched, b"")  # the newest, as JSON
        self.silent = dict.fromkeys(self.watched, 0)  # periods since then
        self.facts: dict[str, Any] = {"host": socket.gethostname(), "step": 0, "signal": 0}
        self.n_beats, self.signals = 0, ()
        self.ear, self.mouth = socket.socketpair()  # what a handler or another thread tells this one
        self.ear.settimeout(self.period)
        self.mouth.setblocking(False)
        if rank == 0:
            store.set(END, "")
        self.beat()

    def run(self):
        while True:
            try:
                told = self.ear.recv(64)
            except TimeoutError:
                told = b""
            if 0 in told:
                return
            if numbers := set(told) & set(self.signals):
                self.facts["signal"] = max(numbers)
            try:
                self.beat()
                self.look(bool(told))
            except (dist.DistError, RuntimeError):  # the store's host is silent
                self.silent = {number: periods + 1 for number, periods in self.silent.items()}
            self.judge()

    def beat(self):
        """Writes where the main thread is, which takes its innermost frame in this repository."""
        self.n_beats += 1
        self.store.set(key(self.rank), json.dumps(self.facts | {"where": place(), "number": self.n_beats}))

    def look(self, is_early):
        """Reads the beats that this process watches. is_early: before a whole period has passed."""
        end, *beats = self.store.multi_get([END, *map(key, self.watched)])
        if end:
            os._exit(1)
        for number, beat in zip(self.watched, beats, strict=True):
            self.silent[number] = self.silent[number] + (not is_early) if beat == self.beats[number] else 0
            self.beats[number] = beat

    def judge(self):
        """Ends all processes if one is silent. Counts periods, not seconds: a laptop may sleep, with all of them."""
        signaled = self.facts["signal"] or any(json.loads(beat)["signal"] for beat in self.beats.values() if beat)
        limit = min(self.limit, GRACE) if signaled else self.limit
        silent = [number for number, periods in self.silent.items() if periods * self.period >= limit]
        if silent:
            lost = {number: json.loads(self.beats[number] or "null") for number in silent}
            self.report(f"no word for {limit:.0f} s from {described(lost)}; the run ends")
            with contextlib.suppress(dist.DistError, RuntimeError):
                self.store.set(END, "1")
            os._exit(1)

    def report(self, text):
        """Prints an error line, unless another process has printed one of its own."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.store.add("reports", 1) > 1:
                return
        with contextlib.suppress(OSError):
            os.write(2, f"error: {text}. --init_from=auto continues from the newest checkpoint\n".encode())

    def odd_ones(self):
        """Returns {rank: beat} of the silent processes or, if all beat, of those that are elsewhere than this one."""
        keys = [*map(key, range(self.world_size))]
        before = self.store.multi_get(keys)
        time.sleep(2 * self.period)
        silent = [number for number, beat in enumerate(self.store.multi_get(keys)) if beat == before[number]]
        beats = {number: json.loads(beat) for number, beat in enumerate(before)}
        own = beats[self.rank]
        elsewhere = [n for n, beat in beats.items() if (beat["step"], beat["where"]) != (own["step"], own["where"])]
        return {number: beats[number] for number in silent or elsewhere}

    def stop(self):
        self.mouth.send(b"\0")
        self.join()


def key(rank):
    """Name of a process's beat in the store."""
    return f"beat {rank}"


def place():
    """Returns file, line and function of the main thread's innermost frame in this repository."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def is_ours(path):
    return path.startswith(str(CODE)) and "site-packages" not in path and path != __file__


def described(beats):
    """Describes processes, {rank: beat}; a beat is None if none was ever heard."""
    texts = [
        f"rank {number} on {beat['host']}, last heard of at step {beat['step']}, in {beat['where']}"
        if beat
        else f"rank {number}, which was never heard of"
        for number, beat in [*beats.items()][:NAMED]
    ]
    return "; ".join(texts) + f"; and {len(beats) - NAMED} more" * (len(beats) > NAMED)


# -- for the main thread


def start(store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Begins this process's heartbeats. timeout: of collectives, in seconds; half of it ends the run in silence."""
    global heart
    heart = Heart(store, rank, world_size, timeout / 2 or math.inf)
    heart.start()


def stop(store: Any, most: timedelta) -> None:
    """Waits until all processes stop their heartbeats, at the end of a run, and ends this one's.

    store: torchrun's, over a connection other than the heartbeats'. most: time to wait.
    """
    global heart
    if heart:
        if store.add(LEAVING, 1) == heart.world_size:
            store.set(ALL, "")
        store.wait([ALL], most)
        heart.stop()
    heart = None


def tell(**facts: Any) -> None:
    """Adds facts to this process's beats from now on."""
    if heart:
        heart.facts |= facts


def heard(fact: str) -> dict[int, Any]:
    """Returns {rank: a fact that it told}, as of its newest beat. Rank 0 hears all, the others only rank 0."""
    beats = {number: json.loads(beat) for number, beat in heart.beats.items() if beat} if heart else {}
    return {number: beat[fact] for number, beat in beats.items() if fact in beat}


def watch_signals(numbers: Iterable[int]) -> None:
    """Lets the heartbeats know of these signals, even if the main thread waits for a message. None: of none."""
    if heart:
        heart.signals = tuple(numbers)
        signal.set_wakeup_fd(heart.mouth.fileno() if heart.signals else -1, warn_on_full_buffer=False)


def explain_lost_peer(error: BaseException) -> bool:
    """Returns True if the error is that of a failed message between processes. Then a line says who is missing.

    One process of all prints it.
    """
    is_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    if not heart or not (is_gloo or isinstance(error, dist.DistError)):
        return False
    reason = str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0].rstrip(".")
    with contextlib.suppress(dist.DistError, RuntimeError):
        who = described(heart.odd_ones())
        heart.report(f"a message between processes failed ({reason}){who and ': '}{who}")
    return True
