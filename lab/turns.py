"""Workers: processes that train at the same time and step in turns, so that a round takes no longer than its steps.

A process that has compiled a step and warmed up waits for its turn (measure.take_turns), and disturbs nobody meanwhile,
but it holds its memory. On Linux all of them are forks of one server, so that none has a luckier layout of memory.
"""

import json
import sys
from multiprocessing.connection import Listener
from time import monotonic

from lab import launch, plan
from nanoladder import machine

MOMENT = 0.01  # seconds; a timeout of 0 would mean not to wait at all


class TimeUp(Exception):
    """A process has not answered in time."""


class Worker:
    """A process that trains with a config, and takes its steps when asked.

    losses: of the first steps. seconds: of a step, when last measured. Raises RuntimeError with the reason if the
    process fails, and TimeUp if an answer takes longer than `limit` seconds.
    """

    def __init__(self, config, limit):
        start = monotonic()
        with Listener() as listener:
            self.child = launch.Child(["turns", f"--address={listener.address}", *plan.command_line(vars(config))])
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
            raise RuntimeError(launch.reason(self.child.finish()).removeprefix("error: ")) from None
        self.end()
        raise TimeUp

    def end(self):
        """Ends the process at once, unless it has ended."""
        if not self.connection.closed:
            self.connection.close()
            self.stop()

    def stop(self):
        self.child.kill()
        self.child.finish()


class WorkerPool:
    """The workers that run, one for each config; once two did not fit the memory, only one at a time (apart)."""

    def __init__(self):
        self.running, self.starts, self.apart = {}, [], False

    def worker(self, config, limit):
        """The worker that trains with a config; starts it if it does not run. Raises RuntimeError and TimeUp."""
        if config not in self.running:
            if self.apart:
                self.end()
            start = monotonic()
            try:
                self.running[config] = Worker(config, limit)
            except RuntimeError as error:
                if not (self.running and machine.is_out_of_memory(str(error))):
                    raise
                self.end()
                self.running[config] = Worker(config, limit - (monotonic() - start))
                self.apart = True  # alone it fits
            self.starts.append(monotonic() - start)  # seconds
        return self.running[config]

    def end(self, config=None):
        """Ends the worker that trains with a config, or all."""
        for one in [config] if config else list(self.running):
            if one in self.running:
                self.running.pop(one).end()
