"""Triggers to save, or to save and end: a timer and signals."""

import contextlib
import os
import signal
import time

from nanoladder import parallel

SIGNALS = [signal.SIGTERM, signal.SIGINT]
if hasattr(signal, "SIGUSR1"):  # not on Windows; SLURM can send it before a job's time limit
    SIGNALS.append(signal.SIGUSR1)


class Signals:
    """Defers a signal to the end of a step, the same in all processes; a second SIGINT exits at once.

    received: the signal that ends the run, None until all processes agree on one.
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
            os._exit(128 + number)  # safe: file writes are atomic
        self.number = number
        if parallel.rank() == 0:
            text = f"\n{signal.Signals(number).name} received: the run ends after this step\n"
            with contextlib.suppress(OSError):  # stderr's reader may be gone, as in entry.outlast_output()
                os.write(2, text.encode())  # print is not reentrant

    def save_due(self):
        """True if the run should save after this step: the timer expired or a signal arrived. Call it every step."""
        now = time.monotonic()
        due = parallel.rank() == 0 and now - self.due_since >= self.seconds
        if due:
            self.due_since = now
        number, due = self.agreed(self.number, int(due))
        self.received = signal.Signals(number) if number else None
        return bool(number or due)
