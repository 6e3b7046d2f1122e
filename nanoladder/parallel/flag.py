"""A flag that any process raises and all see after the same step. It travels with all_reduce_mean(), as no message."""

import torch


class LaggedFlag:
    """Flag of a run; is_raised: by this process.

    A call returns True if any process had raised it before the first all_reduce_mean() since the call before. Call it
    at the end of a step, which begins with one: it waits for the device to begin the step. A single process sees its
    own flag at once.
    """

    def __init__(self) -> None:
        global current
        self.is_raised, self.read = False, None
        current = self

    def __call__(self) -> bool:
        read, self.read = self.read, None
        return read() > 0 if read else self.is_raised


current = LaggedFlag()  # the newest run's; before the first, one that nobody raises


def beside(number: torch.Tensor) -> torch.Tensor:
    """Returns a tensor (2,) of a number () and this process's flag."""
    return torch.stack([number, torch.full_like(number, current.is_raised)])


def taken_from(reduced: torch.Tensor) -> torch.Tensor:
    """Returns the number () of a reduced tensor (2,). Its flag is that of the next call."""
    number, raised = reduced
    if current.read is None:
        current.read = start_reading(raised)
    return number


def start_reading(tensor):
    """Starts to copy a number () from its device. Returns a function that waits for this copy alone and returns it."""
    copy, copied = tensor.to("cpu", non_blocking=True), torch.get_device_module(tensor.device.type).Event()
    copied.record()

    def read():
        copied.synchronize()
        return copy.item()

    return read
