"""Limits of devices: from datasheets, and measured."""

import math

import pytest
import torch

from lab.predict import devices
from nanoladder.errors import BadInput


def test_measured_limits_are_medians_and_no_cache_is_slower_than_the_memory():
    def limits(factor, new):
        cached = {"262144": 4e9 * factor, "4194304": 1e9 * factor}
        rates = {"flops": {"float32": 1e11 * factor}, "copy_bytes": 2e9 * factor, "cached_bytes": cached}
        return rates | {"launch_seconds": 1e-6 * factor} | ({"new_bytes": new * factor} if new else {})

    device = devices.measured("X", [limits(factor, 1e9) for factor in (1, 2, 9)])
    assert device.flops == {"float32": 2e11} and device.launch_seconds == 2e-6 and device.new_bytes_per_s == 2e9
    assert [device.bandwidth(size) for size in (1, 2**18, 2**18 + 1, 2**22 + 1)] == [8e9, 8e9, 4e9, 4e9]
    assert devices.measured("a GPU", [limits(1, None), limits(2, None)]).new_bytes_per_s == math.inf
    assert devices.measured("not measured", []) is None


def test_a_gpu_is_found_by_its_name_and_for_an_unknown_one_the_nearest_are_named():
    assert devices.datasheet("rtx4090") == devices.datasheet("RTX 4090")
    assert devices.datasheet("h100").flops["bfloat16"] == 989e12
    for name in devices.DATASHEETS:
        assert devices.datasheet(name).bytes_per_s > 1e11
    with pytest.raises(BadInput, match=r"--gpu=H10: no such device, did you mean 'H100'\?; expected T4, "):
        devices.datasheet("H10")
    with pytest.raises(BadInput, match="T4: no rate for bfloat16; expected --dtype=float32 or float16"):
        devices.datasheet("T4").rate("bfloat16")
    assert devices.datasheet("H100").rate("float8_e5m2") == 2 * devices.datasheet("H100").peak() + 1e12  # rounded: 989
    with pytest.raises(BadInput, match="A100: no rate for float8; expected --float8=False"):
        devices.datasheet("A100").rate("float8_e4m3fn")


@pytest.mark.slow
def test_the_machine_s_limits_are_positive_rates(monkeypatch):
    for name, value in {"WINDOW": 0.02, "COPIED": {"cpu": 2**24}, "LARGEST": {"cpu": 256}}.items():
        monkeypatch.setattr(devices, name, value)
    found = devices.limits(torch.device("cpu"))
    rates = [*found["flops"].values(), *found["cached_bytes"].values(), found["copy_bytes"], found["new_bytes"]]
    assert all(1e6 < rate < 1e17 for rate in rates) and 0 < found["launch_seconds"] < 1


@pytest.mark.parametrize("flops, rows", [(5e7, 128), (0.5e9, 256), (3e9, 512), (2.5e12, 2048)])
def test_the_size_of_matrices_follows_the_speed_of_the_machine(flops, rows, monkeypatch):
    """So that measuring limits takes seconds, even if bfloat16 is emulated at half a GFLOP/s."""
    found = []

    def seconds(action):
        found.append(len(action()))
        return 2 * found[-1] ** 3 / flops

    monkeypatch.setattr(devices, "median_seconds", seconds)
    assert devices.product_rate(torch.float32, torch.device("cpu")) == pytest.approx(flops)
    assert found == [2**k for k in range(7, rows.bit_length())]
