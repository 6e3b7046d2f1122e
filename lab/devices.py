"""Limits of devices: GPUs by their datasheets, and this machine as limits.py measures it."""

import math
import statistics
from dataclasses import dataclass, field

from nanoladder.errors import BadInput, nearest
from nanoladder.machine.device import PEAK_TFLOPS

# Dense TFLOP/s in float32 on vector units and in TF32 (None: the GPU has none), GB/s of the memory, and if it has
# bfloat16; in half precision, machine.PEAK_TFLOPS. From NVIDIA's datasheets of T4, L4, A100 (80 GB, SXM), H100 (SXM)
# and H200 (SXM), the white paper on Ada (2023, appendix A), and the brief on Blackwell (2024, HGX B200).
DATASHEETS = {
    "T4": (8.1, None, 320, False),
    "L4": (30.3, 60, 300, True),
    "RTX 4090": (82.6, 82.6, 1008, True),
    "A100": (19.5, 156, 2039, True),
    "H100": (67, 494.5, 3350, True),
    "H200": (67, 494.5, 4800, True),
    "B200": (80, 1100, 8000, True),
}
LAUNCH = 4e-6  # seconds between the starts of two short kernels on a GPU: an assumption, on no datasheet


@dataclass(frozen=True)
class Device:
    """Limits of a device. flops: {dtype: FLOP/s of matrix products}; float32's is that of the vector units as well.

    cached: {bytes: bytes/s} of tensors so small that a cache holds them. new_bytes_per_s: of pages that are touched for
    the first time. source: where the numbers come from.
    """

    name: str
    source: str
    flops: dict
    bytes_per_s: float
    launch_seconds: float
    cached: dict = field(default_factory=dict)
    new_bytes_per_s: float = math.inf

    def bandwidth(self, size):
        """Bytes/s of a tensor of so many bytes."""
        return next((rate for most, rate in sorted(self.cached.items()) if size <= most), self.bytes_per_s)

    def rate(self, dtype, tf32=False):
        """FLOP/s of matrix products. tf32: float32's inputs may be rounded. Raises BadInput for a dtype it lacks."""
        if dtype == "float32" and tf32:
            return self.flops.get("tf32", self.flops["float32"])
        if dtype not in self.flops:
            raise BadInput(f"{self.name}: no rate for {dtype}; expected --dtype={' or '.join(self.dtypes())}")
        return self.flops[dtype]

    def dtypes(self):
        return [dtype for dtype in ("float32", "bfloat16", "float16") if dtype in self.flops]


def datasheet(name):
    """The Device of a GPU in DATASHEETS, whatever its name's case and spaces. Raises BadInput for any other name."""
    known = {gpu.replace(" ", "").lower(): gpu for gpu in DATASHEETS}.get(name.replace(" ", "").lower())
    if not known:
        question = nearest(name, DATASHEETS, key=str.upper)
        raise BadInput(f"--gpu={name}: no such device{question}; expected {', '.join(DATASHEETS)}")
    float32, tf32, gigabytes, has_bfloat16 = DATASHEETS[known]
    half = PEAK_TFLOPS[known]
    rates = {"float32": float32, "tf32": tf32, "float16": half, "bfloat16": half if has_bfloat16 else None}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate}
    return Device(known, "datasheet", flops, gigabytes * 1e9, LAUNCH)


def measured(name, limits):
    """The Device of lab/limits.py's measurements, the median of several; None if they are older than launches are."""
    if not limits or "launch_seconds" not in limits[0]:
        return None

    def median(number):
        return statistics.median(map(number, limits))

    flops = {dtype: median(lambda limit, dtype=dtype: limit["flops"][dtype]) for dtype in limits[0]["flops"]}
    memory = median(lambda limit: limit["copy_bytes"])
    sizes = limits[0]["cached_bytes"]  # of which a copy may be slower than the memory, if it is mostly a launch
    cached = {int(size): max(memory, median(lambda limit, size=size: limit["cached_bytes"][size])) for size in sizes}
    launch, new = median(lambda limit: limit["launch_seconds"]), median(lambda limit: limit["new_bytes"] or math.inf)
    return Device(name, "measured here", flops, memory, launch, cached, new)
