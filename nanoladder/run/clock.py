"""Clock for training steps."""

import time

import torch


def synchronized_time(device: torch.device) -> float:
    """Waits until the device has finished all work. Returns the time in seconds, from an arbitrary origin."""
    torch.get_device_module(device.type).synchronize()  # on a CPU a no-op
    return time.perf_counter()


def time_product(device: torch.device, dtype: torch.dtype) -> float:
    """Milliseconds of a product of two square matrices on the device, the fastest of five: what hiccups leave alone.

    Processes wait for each other, so their steps take equally long, whichever of them is slow; this product waits for
    nobody.
    """
    n = 256 if device.type == "cpu" else 4096
    matrix, times = torch.ones(n, n, device=device, dtype=dtype), []
    for _ in range(5):
        began = synchronized_time(device)
        torch.mm(matrix, matrix)
        times.append(synchronized_time(device) - began)
    return min(times) * 1e3


class StepClock:
    """Stopwatch for training steps; stopped during evaluation, saving and logging."""

    def __init__(self, device):
        self.device = device
        self.elapsed, self.started = 0.0, None

    def start(self):
        """Starts the clock unless it is running."""
        if self.started is None:
            self.started = synchronized_time(self.device)

    def stop(self):
        """Stops the clock if it is running."""
        if self.started is not None:
            self.elapsed += synchronized_time(self.device) - self.started
            self.started = None

    def lap(self):
        """Stops the clock and resets it to 0. Returns the elapsed seconds."""
        self.stop()
        seconds, self.elapsed = self.elapsed, 0.0
        return seconds
