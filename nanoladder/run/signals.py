"""What asks a run to save, or to save and end: every so many minutes, and signals."""

import os
import signal
import time

from nanoladder import parallel

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: what SLURM can be told to send before its end
GRACE = 600  # seconds, more than torchrun and SLURM usually leave between SIGTERM and SIGKILL


class Interrupts:
    """In its context a signal waits for the end of a step, on which all processes agree; a second SIGINT does not.

    signal: what ends the run, once that is agreed; None so far.
    """

    def __init__(self, save_every_minutes):
        self.seconds = 60 * save_every_minutes or float("inf")
        self.received, self.signal, self.due_since = 0, None, time.monotonic()
        self.agreed = parallel.Agreed()

    def __enter__(self):
        self.before = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number, _):
        if number == self.received == signal.SIGINT:
            os._exit(128 + number)  # files are whole at every instant
        self.received = number
        if parallel.rank() == 0:
            text = f"\n{signal.Signals(number).name} received: the run ends after this step\n"
            os.write(2, text.encode())  # a print may be what was interrupted

    def save(self):
        """Whether to save after this step, as the minutes are over or the run is to end; to be asked every step."""
        now = time.monotonic()
        due = parallel.rank() == 0 and now - self.due_since >= self.seconds
        if due:
            self.due_since = now
        number, due = self.agreed(self.received, int(due))
        self.signal = signal.Signals(number) if number else None
        return bool(number or due)


def outlive(_):
    """For worker processes, which get the signals of their group too: they serve until the run has saved."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
