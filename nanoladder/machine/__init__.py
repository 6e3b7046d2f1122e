"""Hardware and its settings: device, load, precision, memory, graphs. Not here: anything specific to a model or run."""

from nanoladder.machine.cpu_load import cpu_times, free_cpus
from nanoladder.machine.device import (
    ATTENTION_KERNELS,
    attention_kernel,
    check,
    choose_device,
    configure,
    device_name,
    keep_cache_sound,
    peak_flops,
)
from nanoladder.machine.float8 import float8_obstacle, use_float8
from nanoladder.machine.graph import can_capture, capture_obstacle, replay
from nanoladder.machine.memory import (
    allow_open_files,
    free_memory,
    has_limit,
    is_out_of_memory,
    is_out_of_processes,
    keep_freed_memory,
    peak_memory_gb,
    proc_bytes,
    reset_peak_memory,
    total_memory,
    within_free_memory,
)
from nanoladder.machine.precision import choose_dtype, double, require_torchao
