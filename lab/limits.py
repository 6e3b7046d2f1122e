"""The machine that is measured on: its description, and the limits that no training step can exceed."""

import contextlib
import mmap
import platform
import sys
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from nanoladder import machine

SMALLEST, LARGEST = 128, {"cpu": 2048, "cuda": 8192}  # rows of the square matrices that are multiplied
LONGEST_PRODUCT = 0.5  # seconds: matrices grow until the next product would take longer
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes
CACHED = [2**18, 2**22]  # bytes of tensors that a cache may hold
NEW = 2**26  # bytes of new pages that are touched
PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # as a tensor's pages are
WINDOW = 0.3  # seconds for which an action is timed


def limits(device):
    """The most that the machine can do: FLOP/s of a large matrix product by dtype, bytes/s of a copy.

    cached_bytes: {bytes of a tensor: bytes/s of its copy}. launch_seconds: of the smallest operation, many in a row.
    new_bytes: bytes/s of touching pages that are new to the process, beyond writing to them; None on a GPU.
    Takes a few seconds on any machine: where products are slow, as in emulated bfloat16, the matrices are smaller.
    """
    rates = {}
    for name in ["float32", "bfloat16"] + ["tf32", "float16"] * (device.type == "cuda"):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rates[name] = product_rate(torch.float32 if name == "tf32" else getattr(torch, name), device)
    number = torch.zeros(1, device=device)
    return {
        "flops": rates,
        "copy_bytes": copy_rate(COPIED[device.type], device),
        "cached_bytes": {str(size): copy_rate(size, device) for size in CACHED},
        "launch_seconds": median_seconds(lambda: number.add_(1)),
        "new_bytes": None if device.type == "cuda" else new_rate(),
    }


def median_seconds(action):
    """Median seconds of an action, the device synchronized at both ends of each block of calls."""
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=WINDOW).median


def product_rate(dtype, device):
    """FLOP/s of the product of two square matrices, the largest, in doublings, that takes LONGEST_PRODUCT at most."""
    n = SMALLEST
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = median_seconds(lambda a=a, b=b: a @ b)
        if n == LARGEST[device.type] or 8 * seconds > LONGEST_PRODUCT:  # twice the rows take eight times as long
            return 2 * n**3 / seconds
        n *= 2


def copy_rate(size, device):
    """Bytes/s of copying so many bytes: read and written."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source))


def new_rate():
    """Bytes/s of the system's giving new pages to this process."""

    def pages():
        return torch.frombuffer(mmap.mmap(-1, NEW, **PRIVATE), dtype=torch.float32)

    old = pages()
    beyond = median_seconds(lambda: pages().fill_(1)) - median_seconds(lambda: old.fill_(1))
    return NEW / max(beyond, 1e-9)


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
