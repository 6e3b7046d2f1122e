"""The line about speed counts what a round reads, and compares it with a copy."""

import pytest
import torch
from gpts import random_gpt

from nanoladder.infer import CachedGPT, describe_speed, speed


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_reads_weights_and_cache_and_one_position(attention, dtype):
    gpt = random_gpt(9, attention=attention).to(dtype)
    numbers = gpt.n_params - 9 * 16  # all but the positions
    cache = 2 * 2 * 16 * 5 * 7  # keys and values of 2 layers of 16 channels, 5 rows of 7 tokens
    assert speed.bytes_per_round(CachedGPT(gpt, 5, 7)) == (numbers + cache) * dtype.itemsize


def test_the_line_of_known_numbers(monkeypatch):
    monkeypatch.setattr(speed, "bytes_per_round", lambda model: 3_000_000_000)
    monkeypatch.setattr(speed, "copy_rate", lambda device: 20e9)
    line = describe_speed(CachedGPT(random_gpt(9), 5, 7), n_tokens=1500, n_rounds=4, seconds=2.0)
    assert line == "750.0 tokens/s; weights and cache read at 6 GB/s, 30% of the 20 GB/s of a copy"


def test_a_copy_is_timed(monkeypatch):
    clock = iter([0.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr(speed, "TRIALS", 2)
    monkeypatch.setattr(speed, "COPIED", 400)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    assert speed.copy_rate(torch.device("cpu")) == 800  # read and written in the better of two seconds and one
