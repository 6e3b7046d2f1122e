"""Limits of devices, which no training step can exceed: GPUs by their datasheets, and this machine as measured."""

import contextlib
import math
import mmap
import platform
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_map
from torch.utils.benchmark import Timer

from nanoladder import machine
from nanoladder.errors import BadInput, nearest
from nanoladder.machine.device import PEAK_TFLOPS
from nanoladder.machine.float8 import multiply_rows
from operators.float8 import INPUT

# Dense TFLOP/s in float32 on vector units, in TF32 and in float8 (None: the GPU has none, or float8 is refused there),
# GB/s of the memory, and if it has bfloat16; in half precision, machine.PEAK_TFLOPS. From NVIDIA's datasheets of T4,
# L4, A100 (80 GB, SXM), H100 (SXM) and H200 (SXM), the white paper on Ada (2023, appendix A), and the brief on
# Blackwell (2024, HGX B200).
DATASHEETS = {
    "T4": (8.1, None, None, 320, False),
    "L4": (30.3, 60, None, 300, True),
    "RTX 4090": (82.6, 82.6, None, 1008, True),
    "A100": (19.5, 156, None, 2039, True),
    "H100": (67, 494.5, 1979, 3350, True),
    "H200": (67, 494.5, 1979, 4800, True),
    "B200": (80, 1100, 4500, 8000, True),
}
LAUNCH = 4e-6  # seconds between the starts of two short kernels on a GPU: an assumption, on no datasheet
LAUNCH_IN_GRAPH = 1.2e-6  # of a CUDA graph: 1.2 to 1.6 µs on an H200's timeline


@dataclass(frozen=True)
class Device:
    """Limits of a device. flops: {dtype: FLOP/s of matrix products}; float32's is that of the vector units as well.

    cached: {bytes: bytes/s} for tensors small enough to fit in a cache. new_bytes_per_s: rate for pages touched for the
    first time. source: where the numbers come from.
    """

    name: str
    source: str
    flops: dict
    bytes_per_s: float
    launch_seconds: float
    cached: dict = field(default_factory=dict)
    new_bytes_per_s: float = math.inf

    def bandwidth(self, size):
        """Bytes/s at which a tensor of `size` bytes moves."""
        return next((rate for most, rate in sorted(self.cached.items()) if size <= most), self.bytes_per_s)

    def rate(self, dtype, tf32=False):
        """FLOP/s of matrix products. tf32: float32's inputs may be rounded. Raises BadInput if it lacks the dtype."""
        if dtype == "float32" and tf32:
            return self.flops.get("tf32", self.flops["float32"])
        name = "float8" if dtype.startswith("float8") else dtype  # of both kinds
        if name not in self.flops:
            expected = "--float8=False" if name == "float8" else f"--dtype={' or '.join(self.dtypes())}"
            raise BadInput(f"{self.name}: no rate for {name}; expected {expected}")
        return self.flops[name]

    def peak(self):
        """FLOP/s of matrix products in half precision, or float32 if that is faster, to which MFU refers."""
        return max(self.flops[dtype] for dtype in self.dtypes())

    def dtypes(self):
        return [dtype for dtype in ("float32", "bfloat16", "float16") if dtype in self.flops]


def datasheet(name: str) -> Device:
    """The Device of a GPU in DATASHEETS, ignoring case and spaces in its name. Raises BadInput for any other."""
    known = {gpu.replace(" ", "").lower(): gpu for gpu in DATASHEETS}.get(name.replace(" ", "").lower())
    if not known:
        question = nearest(name, DATASHEETS, key=str.upper)
        raise BadInput(f"--gpu={name}: no such device{question}; expected {', '.join(DATASHEETS)}")
    float32, tf32, float8, gigabytes, has_bfloat16 = DATASHEETS[known]
    half = PEAK_TFLOPS[known]
    rates = {"float32": float32, "tf32": tf32, "float16": half, "bfloat16": half if has_bfloat16 else None}
    rates["float8"] = float8
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate}
    return Device(known, "datasheet", flops, gigabytes * 1e9, LAUNCH)


# -- this machine

SMALLEST, LARGEST = 128, {"cpu": 2048, "cuda": 8192}  # rows of the square matrices that are multiplied
LONGEST_PRODUCT = 0.5  # seconds: matrices grow until the next product would take longer
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes
CACHED = [2**18, 2**22]  # bytes of tensors that a cache may hold
NEW = 2**26  # bytes of new pages that are touched
PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # as a tensor's pages are
WINDOW = 0.3  # seconds for which an action is timed


def measured(name: str, limits: list[dict]) -> Device | None:
    """Returns a Device with the medians of several results of limits(); None if there are none."""
    if not limits:
        return None
    most = tree_map(lambda *rates: statistics.median(rates), *limits)
    memory, new = most["copy_bytes"], most.get("new_bytes", math.inf)
    cached = {int(size): max(memory, rate) for size, rate in most["cached_bytes"].items()}  # small copies are launches
    return Device(name, "measured here", most["flops"], memory, most["launch_seconds"], cached, new)


def limits(device: torch.device) -> dict:
    """Measures the machine's limits: FLOP/s of a large matrix product by dtype, bytes/s of a copy.

    cached_bytes: {bytes of a tensor: bytes/s of its copy}. launch_seconds: of the smallest operation, many in a row.
    new_bytes: bytes/s of touching pages that are new to the process, beyond writing to them; not on a GPU.
    Takes a few seconds on any machine: where products are slow, as in emulated bfloat16, the matrices are smaller.
    """
    rates = {}
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if device.type == "cuda":
        kinds |= {"tf32": torch.float32, "float16": torch.float16}
        kinds |= {} if machine.float8_obstacle(device) else {"float8": INPUT}
    for name, dtype in kinds.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rates[name] = product_rate(dtype, device)
    number = torch.zeros(1, device=device)
    return {
        "flops": rates,
        "copy_bytes": copy_rate(COPIED[device.type], device),
        "cached_bytes": {str(size): copy_rate(size, device) for size in CACHED},
        "launch_seconds": median_seconds(lambda: number.add_(1)),
        **({} if device.type == "cuda" else {"new_bytes": new_rate()}),
    }


def median_seconds(action):
    """Median seconds of an action, the device synchronized at both ends of each block of calls."""
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=WINDOW).median


def product_rate(dtype, device):
    """FLOP/s of the largest product of square matrices, by powers of two, that takes at most LONGEST_PRODUCT."""
    n, scale = SMALLEST, torch.ones((), device=device)

    def multiply(a, b):
        return multiply_rows((a, scale), (b, scale), torch.bfloat16, fast=True) if a.itemsize == 1 else a @ b

    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = median_seconds(lambda a=a, b=b: multiply(a, b))
        if n == LARGEST[device.type] or 8 * seconds > LONGEST_PRODUCT:  # twice the rows take eight times as long
            return 2 * n**3 / seconds
        n *= 2


def copy_rate(size, device):
    """Bytes/s of copying `size` bytes, counting reads and writes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source))


def new_rate():
    """Bytes/s at which the system gives new pages to this process."""

    def pages():
        return torch.frombuffer(mmap.mmap(-1, NEW, **PRIVATE), dtype=torch.float32)

    old = pages()
    beyond = median_seconds(lambda: pages().fill_(1)) - median_seconds(lambda: old.fill_(1))
    return NEW / max(beyond, 1e-9)


def describe(device: torch.device) -> dict:
    """The machine on which figures are measured: processor, device and versions."""
    on_gpu = device.type == "cuda"
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):  # no /proc, or a processor without a name
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
