"""The measurement of generation: every row is there or says why not."""

import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from lab import sampling
from lab.sampling import Case

CPU = torch.device("cpu")


def test_the_cases_have_all_that_the_machine_can_do(monkeypatch):
    options = sampling.parse(["--models=tiny", "--batch=2"])
    half = [case[1:] for case in sampling.cases(options, "bfloat16")]
    assert (2, "int8, compiled", "bfloat16") in half and (2, "int8, compiled", "float32") not in half
    assert {dtype for _, method, dtype in half if method == "cached"} == {"float32", "bfloat16"}
    without_half = [case[2:] for case in sampling.cases(options, "float32")]
    assert ("int8, compiled", "float32") in without_half and len(set(without_half)) == len(without_half)
    monkeypatch.setattr(sampling.importlib.util, "find_spec", lambda name: None)
    assert not [case for case in sampling.cases(options, "bfloat16") if "transformers" in case.method]


def test_a_clock_times_what_follows_the_warmup_until_it_is_enough(monkeypatch):
    times = iter(range(1000))
    monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = sampling.Clock()
    with pytest.raises(sampling.Enough):
        for _ in range(1000):
            clock([0])
    assert clock.rounds() == 6 * [1] and len(clock.times) == sampling.WARMUP + 7  # more than SECONDS


def case(method, dtype="float32", batch=2):
    return Case("tiny", batch, method, dtype)


def test_cases_are_measured_in_turn_and_one_that_fails_once(monkeypatch):
    calls, seconds = [], iter([3.0, 1.0, 2.0])

    def apart(measure, limit, of, device):
        calls.append((of.method, limit))
        return {"round": next(seconds), "first": 1.0} if of.method == "cached" else {"note": "out of memory"}

    monkeypatch.setattr(sampling, "apart", apart)
    found = sampling.measure_all([case("recompute"), case("cached")], 80, CPU)
    assert calls == [(name, 10) for name in ("recompute", "cached", "cached", "cached")]
    assert found == {case("recompute"): {"note": "out of memory"}, case("cached"): {"round": 2.0, "first": 1.0}}


def test_no_case_begins_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(sampling, "apart", None)
    assert sampling.measure_all([case("cached")], 0, CPU) == {case("cached"): {"note": "not measured: no time left"}}


def sleep(case, device):
    yield time.sleep(600)


def end_suddenly(case, device):
    yield {"round": 0.5}
    os._exit(3)


def killed_by_the_system(case, device):
    yield {}
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(case, device):
    yield {}
    raise MemoryError


def fail(case, device):
    yield {}
    raise ValueError("no | luck")


@pytest.mark.slow
@pytest.mark.parametrize(
    "measure, found",
    [
        (end_suddenly, {"round": 0.5, "note": "failed: exit code 3"}),
        (killed_by_the_system, {"note": "out of memory"}),
        (run_out_of_memory, {"note": "out of memory"}),
        (fail, {"note": "failed: ValueError: no   luck"}),
    ],
)
def test_a_process_that_does_not_end_well_says_why(measure, found):
    assert sampling.apart(measure, 600, case("cached"), CPU) == found


def test_a_process_that_takes_too_long_is_ended():
    assert sampling.apart(sleep, 2, case("cached"), CPU) == {"note": "too slow: more than 2 s"}


FIGURES = {"round": 0.01, "share": 0.5, "first": 0.2}


def test_the_tables_and_their_lines():
    found = {
        case("recompute"): {"round": 0.1, "share": 0.05, "first": 0.1},
        case("transformers"): {"round": 0.02, "share": 0.25},  # too slow for a first token
        case("transformers", "bfloat16"): {"round": 0.015, "share": 0.25, "first": 0.2},
        case("cached"): FIGURES,
        case("cached", "bfloat16"): {"round": 0.005, "share": 0.5, "first": 0.025},
        case("int8, compiled", "bfloat16"): {"note": "out of memory"},
        case("cached", batch=8): {"note": "too slow: more than 5 s"},
    }
    text = sampling.tables(found, {"gpu": None, "cpu": "a CPU", "threads": 2, "torch": "1"}, 10.0)
    assert text.startswith("a CPU, 2 threads; torch 1; prompts of 16 tokens ")
    assert re.findall("^GPT-2 .*", text, re.MULTILINE) == ["GPT-2 tiny, batch 2", "GPT-2 tiny, batch 8"]
    assert [line for line in text.splitlines() if line.startswith("| ") and "tokens/s" not in line] == [
        "| recompute, float32 | 20.0 | 100.0 | 5% | 0.20 | 0.10 |",
        "| transformers, float32 | 100.0 | 20.0 | 25% | 1.00 | too slow |",
        "| transformers, bfloat16 | 133.3 | 15.0 | 25% | 1.00 | 0.20 |",
        "| cached, float32 | 200.0 | 10.0 | 50% | 2.00 | 0.20 |",
        "| cached, bfloat16 | 400.0 | 5.0 | 50% | 3.00 | 0.03 |",
        "| int8, compiled, bfloat16 | out of memory |  |  |  |  |",
        "| cached, float32 | too slow: more than 5 s |  |  |  |  |",
    ]
    [line] = sampling.comparison(found, "bfloat16")  # 16 tokens: 0.1 s, 1.6 s and 0.425 s
    assert "take 0.10 s" in line and "16.00 times nanoGPT's" in line and "4.25 times transformers'" in line


@pytest.mark.parametrize("word", ["--models=124M,huge", "--batch=0", "--batch=1,", "--minutes=0", "--device=abacus"])
def test_bad_options(word, refused):
    assert word.strip("-").partition("=")[0] in refused(sampling.main, word)


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(sampling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sampling, "apart", lambda *arguments: FIGURES)
    sampling.main(["--models=tiny", "--batch=1", "--device=cpu"])
    assert "python -m pip install transformers" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_measurement_is_a_whole_table(monkeypatch):
    monkeypatch.setattr(sampling, "REPEATS", 1)
    cases = [case(method) for method in ("recompute", "transformers", "cached")]
    found = sampling.measure_all(cases, 8 * 600, CPU)
    assert all(figures.keys() == {"round", "share", "first"} for figures in found.values()), found
    assert all(figure > 0 for figures in found.values() for figure in figures.values())
