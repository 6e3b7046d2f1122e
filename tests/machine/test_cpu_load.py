"""Load of other programs: measured without counting this one; reported in the header if it makes threads wait."""

import math

import pytest
import torch

from nanoladder import machine, parallel
from nanoladder.machine import cpu_load
from nanoladder.run import header

STAT = """\
cpu  1 1 1 1 1 1 1 1 0 0
cpu0 {user} {nice} 50 {idle} 0 0 0 0 0 0
cpu1 900 0 0 100 0 0 0 0 0 0
intr 1
"""


def test_free_cpus_are_what_other_programs_leave(tmp_path, monkeypatch):
    """Ten seconds of the one CPU that this process may use: 2 idle, 1 niced, 3 of this program, 4 of others."""
    monkeypatch.setattr(cpu_load, "Path", lambda name: tmp_path / "stat")
    monkeypatch.setattr(cpu_load.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(cpu_load.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(cpu_load.os, "times", lambda: times)
    monkeypatch.setattr(cpu_load.time, "monotonic", lambda: clock)
    times, clock = (1.0, 0.0, 0.0, 0.0, 0.0), 5.0
    (tmp_path / "stat").write_text(STAT.format(user=100, nice=100, idle=100))
    began = machine.cpu_times()
    times, clock = (2.0, 0.5, 1.0, 0.5, 9.0), 15.0
    (tmp_path / "stat").write_text(STAT.format(user=800, nice=200, idle=300))
    assert machine.free_cpus(began) == pytest.approx(0.6)
    (tmp_path / "stat").unlink()  # as on macOS
    assert machine.free_cpus(began) == machine.free_cpus(machine.cpu_times()) == math.inf


@pytest.mark.parametrize(
    "free, threads, given, expected",
    [
        (1.0, 2, {}, "leave 1.0 CPUs for 2 threads: faster now with OMP_WAIT_POLICY=passive"),
        (5.2, 8, {}, "or with OMP_NUM_THREADS=5"),
        (1.9, 2, {}, None),
        (math.inf, 8, {}, None),
        (1.0, 2, {"device": "cuda"}, None),
        (1.0, 2, {"processes": 2}, None),  # of torchrun, which compete for the CPUs
        (1.0, 2, {"policy": "passive"}, None),
    ],
)
def test_a_faster_setting_is_named_only_on_a_busy_machine(free, threads, given, expected, monkeypatch):
    monkeypatch.setattr(machine, "free_cpus", lambda _: free)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(parallel, "world_size", lambda: given.get("processes", 1))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if "policy" in given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given["policy"])
    said = header.busy(torch.device(given.get("device", "cpu")), None)
    assert (expected in said["busy"]) if expected else said == {}
