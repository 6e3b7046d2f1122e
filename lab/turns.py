"""Contenders: processes that train at the same time and step in turns, so that a round takes no longer than its steps.

A process that has compiled a step and warmed up waits for its turn (measure.take_turns), and disturbs nobody meanwhile,
but it holds its memory. On Linux all of them are forks of one server, so that none has a luckier layout of memory.
"""

import json
from multiprocessing.connection import Listener

from lab import launch


class Contender:
    """A process that trains with a config, and takes its steps when asked. losses: of its first ones.

    Raises RuntimeError with the reason if the process fails, or if an answer takes longer than so many seconds.
    """

    def __init__(self, words, limit):
        with Listener() as listener:
            self.kill, self.finish = launch.start(["turns", f"--address={listener.address}", *words])
            self.connection = listener.accept()
        found = self.receive(limit)
        self.losses, self.seconds = found["losses"], found["seconds"]

    def turn(self, limit):
        """Seconds of a step, over about a second of steps."""
        self.connection.send_bytes(b"turn")
        self.seconds = self.receive(limit)["seconds"]
        return self.seconds

    def receive(self, limit):
        """The next answer."""
        try:
            if self.connection.poll(max(0.0, limit)):
                return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError(launch.reason(self.finish()).removeprefix("error: ")) from None
        self.end()
        raise RuntimeError(f"stopped after {limit:.0f} s")

    def end(self):
        """Ends the process at once."""
        self.connection.close()
        self.kill()
        self.finish()
