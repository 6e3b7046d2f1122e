"""Memory of this machine: free bytes, limits for a process, peak usage, and the allocators."""

import contextlib
import ctypes
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from nanoladder import private
from nanoladder.errors import lacks_memory

try:
    import resource
except ImportError:  # Windows
    resource = None

NO_THREAD = "start new thread"  # in Python's error
GLIBC = platform.libc_ver()[0] == "glibc"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def keep_freed_memory(device: torch.device) -> None:
    """Makes this process keep freed memory for later allocations instead of returning it to the system."""
    if device.type == "cuda":
        private.set_allocator("expandable_segments:True")
    elif device.type == "cpu" and GLIBC:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap never shrinks


def free_memory(device: torch.device) -> float:
    """Bytes that this process can still allocate: GPU memory, or its share of the machine's memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by PyTorch's cache
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    try:
        free = proc_bytes("/proc/meminfo", "MemAvailable")
    except OSError:  # not Linux
        return installed_memory()
    with contextlib.suppress(OSError, ValueError):
        used = re.search(r"^anon (\d+)$", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
        free = min(free, container_limit() - int(used[1]))
    return max(0, free // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def total_memory(device: torch.device) -> float:
    """Bytes that this process could allocate if no other program used any: GPU memory, or its share of the machine's.

    On Linux with swap space.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        total, swap = (proc_bytes("/proc/meminfo", field) for field in ("MemTotal", "SwapTotal"))
    except OSError:  # not Linux
        return installed_memory()
    with contextlib.suppress(OSError, ValueError):
        total = min(total, container_limit())
    return (total + swap) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def installed_memory():
    """Bytes of the machine's memory; infinite on Windows, where it is unknown."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def container_limit():
    """Bytes of a container's limit. Raises OSError or ValueError if there is none: its file then says "max"."""
    return int(Path("/sys/fs/cgroup/memory.max").read_text())


@contextlib.contextmanager
def within_free_memory(device: torch.device) -> Iterator[None]:
    """Makes allocations on a CPU fail once no memory is free; Linux would kill the process without a message.

    A context manager; on other devices and systems it does nothing.
    """
    if device.type != "cpu" or sys.platform != "linux":
        yield
        return
    before = _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = proc_bytes("/proc/self/status", "VmData") + int(free_memory(device))
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def proc_bytes(path: Path | str, field: str) -> int:
    """Returns a field of a /proc file, converted from KiB to bytes. Raises OSError if there is none."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {field}")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception reports that GPU, CPU or Python memory ran out, or in limited memory that of a thread."""
    causes = r"out of memory|allocate memory|not enough memory|bad_alloc|ALLOC_FAILED|MemoryError"
    causes += f"|{NO_THREAD}" if has_limit() else ""
    return lacks_memory(error) or (isinstance(error, RuntimeError) and bool(re.search(causes, str(error))))


def is_out_of_processes(error: BaseException) -> bool:
    """True if an exception reports that no more threads or processes can start, though memory is not limited."""
    return isinstance(error, BlockingIOError) or (NO_THREAD in str(error) and not has_limit())


def has_limit() -> bool:
    """True if this process's address space or data are limited, as by `ulimit -v`."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA) if resource else ()
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def allow_open_files() -> None:
    """Raises the limit of open files as far as this process may: gloo opens one for every other process of a group."""
    if resource:
        with contextlib.suppress(ValueError, OSError):  # macOS allows fewer than its limit says
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far in GB (1e9 bytes): allocated on a GPU, or resident memory of the process on a CPU.

    On mps, which reports no peak: Metal's memory for the process, which seldom shrinks. On Windows' CPU: NaN.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    if resource is None:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def reset_peak_memory(device: torch.device) -> None:
    """Lets peak_memory_gb count from now on: on CUDA, and on a CPU with Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
