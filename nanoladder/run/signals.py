"""Signals that save and end a run."""

import contextlib
import os
import signal

from nanoladder import parallel

SIGNALS = [signal.SIGTERM, signal.SIGINT]
if hasattr(signal, "SIGUSR1"):  # not on Windows; SLURM can send it before a job's time limit
    SIGNALS.append(signal.SIGUSR1)


class Signals:
    """Defers a signal to the end of a step, the same in all processes; a second SIGINT exits at once.

    received: the signal that ends the run, None until all processes agree on one.
    """

    def __init__(self):
        self.number, self.received = 0, None
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

    def arrived(self):
        """True once a signal has arrived that ends the run. Collective: call it every step."""
        number = self.agreed(self.number)
        self.received = signal.Signals(number) if number else None
        return bool(number)
