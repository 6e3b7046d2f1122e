"""Limits of devices: GPUs by their datasheets, this machine as limits.py measures it, and any other from a file."""

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from nanoladder import files
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
RATES = ("float32", "tf32", "bfloat16", "float16")


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
        return [dtype for dtype in RATES if dtype in self.flops and dtype != "tf32"]


def datasheet(name):
    """The Device of a GPU in DATASHEETS, whatever its name's case and spaces. Raises BadInput for any other name."""
    simple = {"".join(filter(str.isalnum, known)).lower(): known for known in DATASHEETS}
    asked = "".join(filter(str.isalnum, name)).lower()
    if asked not in simple:
        question = nearest(name, DATASHEETS, key=str.upper)
        raise BadInput(
            f"--gpu={name}: no such device{question}; expected {', '.join(DATASHEETS)}, or --device_file=FILE"
        )
    known = simple[asked]
    float32, tf32, gigabytes, has_bfloat16 = DATASHEETS[known]
    rates = {"float32": float32, "tf32": tf32, "float16": PEAK_TFLOPS[known]}
    rates |= {"bfloat16": PEAK_TFLOPS[known]} if has_bfloat16 else {}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate}
    return Device(known, "datasheet", flops, gigabytes * 1e9, LAUNCH)


def measured(name, limits):
    """The Device of lab/limits.py's measurements, the median of several; None if they are older than launches are."""
    if not limits or "launch_seconds" not in limits[0]:
        return None

    def median(number):
        return statistics.median(number(limit) for limit in limits)

    flops = {dtype: median(lambda limit, dtype=dtype: limit["flops"][dtype]) for dtype in limits[0]["flops"]}
    memory = median(lambda limit: limit["copy_bytes"])
    sizes = limits[0]["cached_bytes"]  # of which a copy may be slower than the memory, if it is mostly a launch
    cached = {int(size): max(memory, median(lambda limit, size=size: limit["cached_bytes"][size])) for size in sizes}
    launch, new = median(lambda limit: limit["launch_seconds"]), median(lambda limit: limit["new_bytes"] or math.inf)
    return Device(name, "measured here", flops, memory, launch, cached, new)


def read_device(path):
    """The Device of a JSON file: {"name", "flops": {dtype: FLOP/s}, "bytes_per_s", "launch_seconds"}.

    Raises BadInput if the file is not like that.
    """
    wanted = '{"name": "X", "flops": {"float32": 1e13, "bfloat16": 1e14}, "bytes_per_s": 1e12, "launch_seconds": 4e-6}'
    try:
        found = json.loads(files.read(Path(path), 2**16))
        name, flops, *others = (found[key] for key in ("name", "flops", "bytes_per_s", "launch_seconds"))
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 60:
            raise ValueError("the name is no line of 1 to 60 characters")
        if "float32" not in flops or not flops.keys() <= set(RATES):
            raise ValueError(f"flops are not of float32 and others of {', '.join(RATES)}")
        numbers = [float(number) for number in (*flops.values(), *others)]
        if not all(0 < number < 1e30 for number in numbers):
            raise ValueError("a number is not positive")
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise BadInput(f"--device_file={path} cannot be read ({error!r}); expected {wanted}") from None
    *rates, bytes_per_s, launch_seconds = numbers
    return Device(name, str(path), dict(zip(flops, rates, strict=True)), bytes_per_s, launch_seconds)
