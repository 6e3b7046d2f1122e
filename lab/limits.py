"""The machine that is measured on: its description, and the limits that no training step can exceed."""

import contextlib
import math
import mmap
import platform
import statistics
import sys
from pathlib import Path

import torch

from nanoladder import machine
from nanoladder.run.clock import synchronized_time

SMALLEST, LARGEST = 128, {"cpu": 2048, "cuda": 8192}  # rows of the square matrices that are multiplied
LONGEST_PRODUCT = 0.5  # seconds: matrices grow until the next product would take longer
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes
CACHED = [2**18, 2**22]  # bytes of tensors that a cache may hold
NEW = 2**26  # bytes of new pages that are touched
PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # as a tensor's pages are
WINDOW, WINDOWS, BUDGET = 0.2, 7, 1.5  # seconds that one window times, how many there are, seconds for all of them
SHORT = 0.05  # seconds of a window for short actions


def limits(device):
    """The most that the machine can do: FLOP/s of a large matrix product by dtype, bytes/s of a copy.

    cached_bytes: {bytes of a tensor: bytes/s of its copy}. launch_seconds: of the smallest operation, many in a row.
    new_bytes: bytes/s of touching pages that are new to the process, beyond writing to them; None on a GPU.
    Takes a few seconds on any machine: where products are slow, as in emulated bfloat16, the matrices are smaller.
    """
    rates = {}
    for name in ["float32", "bfloat16"] + ["tf32", "float16"] * (device.type == "cuda"):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        n = largest_product(dtype, device)
        rates[name] = 2 * n**3 / median_seconds(product(n, dtype, device), device)
    return {
        "flops": rates,
        "copy_bytes": copy_rate(COPIED[device.type], device, WINDOW),
        "cached_bytes": {str(size): copy_rate(size, device, SHORT) for size in CACHED},
        "launch_seconds": median_seconds(launch(device), device, SHORT),
        "new_bytes": None if device.type == "cuda" else new_rate(device),
    }


def copy_rate(size, device, window):
    """Bytes/s of copying so many bytes: read and written."""
    return 2 * size / median_seconds(copy(size, device), device, window)


def new_rate(device):
    """Bytes/s of the system's giving new pages to this process."""
    new, old = (median_seconds(touch(is_new), device, SHORT) for is_new in (True, False))
    return NEW / max(new - old, 1e-9)


def launch(device):
    """The smallest action: it adds to one number."""
    number = torch.zeros(1, device=device)
    return lambda: number.add_(1)


def touch(is_new):
    """An action that writes to NEW bytes of a CPU: of new pages, which it gives back, or of the same ones each time."""

    def pages():
        return torch.frombuffer(mmap.mmap(-1, NEW, **PRIVATE), dtype=torch.float32)

    old = pages()
    return lambda: (pages() if is_new else old).fill_(1)


def product(n, dtype, device):
    """An action that multiplies two (n, n) matrices."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def copy(size, device):
    """An action that copies `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def largest_product(dtype, device):
    """Rows of the largest square matrices whose product takes LONGEST_PRODUCT at most, in doublings up to LARGEST."""
    n = SMALLEST
    while n < LARGEST[device.type]:
        action, trials = product(n, dtype, device), []
        for _ in range(3):
            start = synchronized_time(device)
            action()
            trials.append(synchronized_time(device) - start)
        if 8 * min(trials) > LONGEST_PRODUCT:  # twice the rows take eight times as long
            break
        n *= 2
    return n


def median_seconds(action, device, seconds=WINDOW):
    """Seconds of an action: the median of WINDOWS windows, of fewer if they exceed the BUDGET, after a warm-up."""

    def window(count):
        start = synchronized_time(device)
        for _ in range(count):
            action()
        return (synchronized_time(device) - start) / count

    window(1)
    count = math.ceil(seconds / window(1))
    start, timed = synchronized_time(device), []
    while len(timed) < WINDOWS and synchronized_time(device) - start < BUDGET:
        timed.append(window(count))
    return statistics.median(timed)


def describe(device):
    """The machine that figures are measured on: processor, device and versions."""
    on_gpu = device.type == "cuda"
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "native_bfloat16": machine.choose_dtype("auto", device) == torch.bfloat16,
        "amx": torch.cpu._is_amx_tile_supported(),  # bfloat16 at ten times float32; without it, at twice
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "datasheet_flops": machine.peak_flops(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # from 9.15 on its attention comes before flash
        "python": platform.python_version(),
    }
