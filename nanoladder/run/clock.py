"""The clock of the training steps."""

import time

import torch


def synchronized_time(device):
    """Seconds on a clock, read when the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepClock:
    """Measures the time that training steps take; it stands still while anything else is done."""

    def __init__(self, device):
        self.device = device
        self.elapsed, self.started = 0.0, None

    def start(self):
        """Lets the clock run, unless it does already."""
        if self.started is None:
            self.started = synchronized_time(self.device)

    def stop(self):
        """Lets the clock stand still, unless it does already."""
        if self.started is not None:
            self.elapsed += synchronized_time(self.device) - self.started
            self.started = None

    def lap(self):
        """Stops the clock and sets it back to 0. Returns the seconds that it showed."""
        self.stop()
        seconds, self.elapsed = self.elapsed, 0.0
        return seconds
