"""Contenders: processes that train at the same time and step in turns, so that a round takes no longer than its steps.

A process that has compiled a step and warmed up waits for its turn (measure.take_turns), and disturbs nobody meanwhile,
but it holds its memory. On Linux all of them are forks of one server, so that none has a luckier layout of memory.
"""

import contextlib
import json
import sys
from multiprocessing.connection import Listener
from time import monotonic

from lab import launch
from nanoladder import machine

MOMENT = 0.01  # seconds; a timeout of 0 would mean not to wait at all


class TimeUp(Exception):
    """A process has not answered in time."""


class Contender:
    """A process that trains with a config, and takes its steps when asked.

    losses: of the first steps. seconds: of a step, when last measured. Raises RuntimeError with the reason if the
    process fails, and TimeUp if an answer takes longer than `limit` seconds.
    """

    def __init__(self, words, limit):
        start = monotonic()
        with Listener() as listener:
            self.kill, self.finish = launch.start(["turns", f"--address={listener.address}", *words])
            if sys.platform != "win32":  # its pipes have no timeout
                listener._listener._socket.settimeout(max(MOMENT, limit))
            try:
                self.connection = listener.accept()
            except TimeoutError:
                self.stop()
                raise TimeUp from None
        found = self.receive(limit - (monotonic() - start))
        self.losses, self.seconds = found["losses"], found["seconds"]

    def turn(self, limit):
        """Seconds of a step, over about a second of steps."""
        self.seconds = self.receive(limit, b"turn")["seconds"]
        return self.seconds

    def receive(self, limit, request=b""):
        """The next answer, after a request if there is one."""
        try:
            if request:
                self.connection.send_bytes(request)
            if self.connection.poll(max(0.0, limit)):
                return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # it has ended
            self.connection.close()
            raise RuntimeError(launch.reason(self.finish()).removeprefix("error: ")) from None
        self.end()
        raise TimeUp

    def end(self):
        """Ends the process at once, unless it has ended."""
        if not self.connection.closed:
            self.connection.close()
            self.stop()

    def stop(self):
        self.kill()
        with contextlib.suppress(launch.ServerEnded):
            self.finish()


class Ring:
    """The contenders that run, one for each config; once two did not fit the memory, only one at a time (apart)."""

    def __init__(self):
        self.running, self.starts, self.apart = {}, [], False

    def contender(self, words, limit):
        """The contender that trains with a config; starts it if it does not run. Raises RuntimeError and TimeUp."""
        key = tuple(words)
        if key not in self.running:
            if self.apart:
                self.end()
            start = monotonic()
            try:
                self.running[key] = Contender(words, limit)
            except RuntimeError as error:
                if not (self.running and machine.is_out_of_memory(str(error))):
                    raise
                self.end()
                self.running[key] = Contender(words, limit - (monotonic() - start))
                self.apart = True  # alone it fits
            self.starts.append(monotonic() - start)  # seconds
        return self.running[key]

    def end(self, words=None):
        """Ends the contender that trains with a config, or all."""
        for key in [tuple(words)] if words else list(self.running):
            if key in self.running:
                self.running.pop(key).end()
