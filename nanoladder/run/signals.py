"""Signals that save and end a run."""

import contextlib
import os
import signal

from nanoladder import parallel

SIGNALS = [signal.SIGTERM, signal.SIGINT]
if hasattr(signal, "SIGUSR1"):  # not on Windows
    SIGNALS.append(signal.SIGUSR1)  # SLURM can send it before a job's time limit
    SIGNALS.append(signal.SIGHUP)  # sent when a terminal closes or its connection drops


class Interrupted(BaseException):
    """A signal ended a wait."""


class Signals:
    """Defers a signal to the end of a step, the same in all processes; a second SIGINT exits at once.

    received: the signal that ends the run, None until all processes agree on one.
    """

    def __init__(self):
        self.number, self.received, self.waiting = 0, None, False
        self.flag = parallel.LaggedFlag()

    def __enter__(self):
        handled = [number for number in SIGNALS if number.name != "SIGHUP" or not hangup_is_ignored()]
        self.before = {number: signal.signal(number, self.receive) for number in handled}
        parallel.watch_signals(handled)
        return self

    def __exit__(self, *_):
        parallel.watch_signals([])
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number, _):
        if number == self.number == signal.SIGINT:
            os._exit(128 + number)  # safe: file writes are atomic
        self.number, self.flag.is_raised = number, True
        if parallel.rank() == 0:
            again = "; a second Ctrl-C ends it at once, unsaved" if number == signal.SIGINT else ""
            text = f"\n{signal.Signals(number).name} received: the run ends after this step{again}\n"
            with contextlib.suppress(OSError):  # stderr's reader may be gone, as in entry.outlast_output()
                os.write(2, text.encode())  # print is not reentrant
        if self.waiting:
            self.end_wait()

    @contextlib.contextmanager
    def ending_wait(self):
        """Lets a signal, even an earlier one, end the wait in this block: it raises Interrupted.

        Several processes have to agree first, after a step.
        """
        self.waiting = parallel.world_size() == 1
        try:
            if self.waiting and self.number:
                self.end_wait()
            yield
        finally:
            self.waiting = False

    def end_wait(self):
        self.waiting, self.received = False, signal.Signals(self.number)
        raise Interrupted

    def arrived(self):
        """True once a signal has arrived that ends the run. Collective: call it every step."""
        if not self.flag():
            return False
        self.received = signal.Signals(max(parallel.gather_objects(self.number)))
        return True


def hangup_is_ignored():
    """True if the caller ignores SIGHUP (nohup), unless torchrun, which handles it even then, sends it on."""
    sent = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "SIGHUP" not in sent
