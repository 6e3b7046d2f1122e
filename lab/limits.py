"""What figures depend on: the machine, and the most that it can do."""

import contextlib
import math
import platform
import statistics
from pathlib import Path

import torch

from nanoladder.run import report


def limits(device):
    """What the machine itself can do: FLOP/s of a large square matrix product by dtype, bytes/s of a copy."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 2048
    rates = {}
    for name in ["float32", "bfloat16"] + ["tf32", "float16"] * on_gpu:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rates[name] = 2 * n**3 / fastest(lambda a=a, b=b: a @ b, device)
    source = torch.ones(2**30 // 4 if on_gpu else 2**28 // 4, device=device)  # 1 GiB, 256 MiB
    target = torch.empty_like(source)
    return {"flops": rates, "copy_bytes": 2 * source.nbytes / fastest(lambda: target.copy_(source), device)}


def fastest(action, device):
    """Seconds of an action: the median of seven windows of a fifth of a second, after two actions to warm up."""

    clock = report.StepClock(device)

    def window(count):
        start = clock.synchronize()
        for _ in range(count):
            action()
        return (clock.synchronize() - start) / count

    window(1)
    count = math.ceil(0.2 / window(1))
    return statistics.median(window(count) for _ in range(7))


def describe(device):
    """What the figures depend on: processor, device, versions."""
    on_gpu = device.type == "cuda"
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "native_bfloat16": torch.cpu._is_avx512_bf16_supported(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "datasheet_flops": report.peak_flops(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # from 9.15 on its attention comes before flash
        "python": platform.python_version(),
    }
