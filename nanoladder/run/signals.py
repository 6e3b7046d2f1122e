"""What asks a run to save, or to save and end: the minutes between checkpoints, and signals."""

import os
import signal
import time

from nanoladder import parallel

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SLURM can be told to send SIGUSR1 before a job's end


class Signals:
    """Lets a signal wait for the end of a step, on which all processes agree; a second SIGINT ends at once.

    received: the signal that ends the run, once all processes agree; None so far.
    """

    def __init__(self, save_every_minutes):
        self.seconds = 60 * save_every_minutes or float("inf")
        self.number, self.received, self.due_since = 0, None, time.monotonic()
        self.agreed = parallel.LaggedMax()

    def __enter__(self):
        self.before = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number, _):
        if number == self.number == signal.SIGINT:
            os._exit(128 + number)  # files are whole at every instant
        self.number = number
        if parallel.rank() == 0:
            text = f"\n{signal.Signals(number).name} received: the run ends after this step\n"
            os.write(2, text.encode())  # a print may be what was interrupted

    def save_due(self):
        """True if the run should save after this step: the minutes are over, or a signal came. Call it every step."""
        now = time.monotonic()
        due = parallel.rank() == 0 and now - self.due_since >= self.seconds
        if due:
            self.due_since = now
        number, due = self.agreed(self.number, int(due))
        self.received = signal.Signals(number) if number else None
        return bool(number or due)
