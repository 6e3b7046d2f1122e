"""CPU time that other programs take from this one."""

import contextlib
import math
import os
import time
from pathlib import Path


def free_cpus(since: tuple[float, float, float] | None) -> float:
    """Number of CPUs that other programs have left to this process since then; infinite if the system does not say.

    since: an earlier result of cpu_times().
    """
    if not (since and (now := cpu_times())):
        return math.inf
    idle, used, clock = (after - before for before, after in zip(since, now, strict=True))
    return (idle + used) / clock


def cpu_times() -> tuple[float, float, float] | None:
    """Seconds so far: idle CPU time, including niced programs, which give way; CPU time of this process; wall time.

    The process's time includes its finished children's. Returns None without Linux's /proc.
    """
    with contextlib.suppress(OSError, AttributeError):
        lines = Path("/proc/stat").read_text().splitlines()
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        fields = [line.split() for line in lines if line.partition(" ")[0] in usable]
        idle = sum(int(nice) + int(idle) + int(iowait) for _, _, nice, _, idle, iowait, *_ in fields)
        return idle / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), time.monotonic()
