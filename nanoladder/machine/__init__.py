"""Hardware and its settings: device, load, precision, memory. Not here: anything that depends on a model or a run."""

from nanoladder.machine.device import (
    ATTENTION_KERNELS,
    attention_kernel,
    check,
    choose_device,
    configure,
    device_name,
    find_compiler,
    keep_cache_sound,
    lacks,
    peak_flops,
)
from nanoladder.machine.load import Load
from nanoladder.machine.memory import (
    GLIBC,
    free_memory,
    is_out_of_memory,
    keep_freed_memory,
    limit_memory,
    peak_memory_gb,
    proc_bytes,
)
from nanoladder.machine.precision import autocast, choose_dtype, double, eight_bit_library, scaler_of, unscale_gradients

__all__ = [
    "ATTENTION_KERNELS",
    "GLIBC",
    "Load",
    "attention_kernel",
    "autocast",
    "check",
    "choose_device",
    "choose_dtype",
    "configure",
    "device_name",
    "double",
    "eight_bit_library",
    "find_compiler",
    "free_memory",
    "is_out_of_memory",
    "keep_cache_sound",
    "keep_freed_memory",
    "lacks",
    "limit_memory",
    "peak_flops",
    "peak_memory_gb",
    "proc_bytes",
    "scaler_of",
    "unscale_gradients",
]
