"""A picture says what it is of, and every word in it can be read: the pictures of all committed results."""

import json

import pytest
from conftest import ROOT

from lab import pictures, tuned
from lab.results import read_results

RESULTS = ROOT / "results"
MODES = [
    (path.relative_to(RESULTS), mode)
    for path in sorted(RESULTS.glob("*/*/results.json"))
    for mode in read_results(path)["modes"]
]
MACHINES = {
    "amd-epyc-2-threads-bf16": "AMD EPYC, 2 threads, native bfloat16",
    "intel-xeon-2-threads-amx": "Intel Xeon, 2 threads, AMX",
}


def title(figure):
    return " ".join(figure.get_suptitle().split())


@pytest.mark.parametrize("path, mode", MODES, ids=str)
def test_a_picture_names_its_mode_config_and_machine(path, mode, drawn, tmp_path):
    results = read_results(RESULTS / path)
    pictures.draw(results, mode, tmp_path / "x.png")
    assert title(drawn["x.png"]) == f"{mode}: {' '.join(results['config'])} {MACHINES[path.parts[0]]}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*/tune.json")), ids=str)
def test_the_picture_of_a_search_has_the_verdict_too(path, drawn, tmp_path):
    results = json.loads(path.read_text())
    race = results["confirmations"][-1]
    tuned.report(results, tuned.verdict({}, race["changes"], race), [], tmp_path, tmp_path)
    found = title(drawn["tune.png"])
    assert found.startswith(f"tune: {' '.join(results['config'])} {MACHINES[path.parts[-3]]}: 1.")
    assert found.endswith("as fast as the finished loop")


def test_a_title_however_long_is_broken_into_lines(drawn, tmp_path):
    results = read_results(RESULTS / "intel-xeon-2-threads-amx/reference-scaling/results.json")
    results["config"] = ["config/x.py", *(f"--key_{n}={n:010}" for n in range(20)), f"--dataset={'x' * 100}"]
    pictures.draw(results, "scaling", tmp_path / "x.png")
    assert "--key_19=0000000019" in title(drawn["x.png"])


def test_a_title_is_no_formula(drawn, tmp_path):
    results = read_results(RESULTS / "intel-xeon-2-threads-amx/reference-scaling/results.json")
    results["config"] = [r"--dataset=a$\fra{$"]
    pictures.draw(results, "scaling", tmp_path / "x.png")
    assert r"--dataset=a$\fra{$" in title(drawn["x.png"])


def test_a_search_is_drawn_against_the_finished_loop_whatever_the_drift_of_the_machine(drawn, tmp_path):
    races = [
        {"name": "a", "outcome": "kept", "note": None, "minute": 1.0, "speeds": [1.19, 1.2, 1.3]},
        {"name": "b", "outcome": "no gain", "note": None, "minute": 2.0, "speeds": [0.9, 1.1]},
        {"name": "c", "outcome": "failed", "note": "out of memory", "minute": 2.5, "speeds": []},
        {"name": "d", "outcome": "kept", "note": None, "minute": 3.0, "speeds": [1.5]},
        {"name": "e", "outcome": "slower", "note": None, "minute": 4.0, "speeds": [0.4]},
    ]
    pictures.draw_search(races, "tune", tmp_path / "tune.png")
    line, *dots = drawn["tune.png"].axes[1].lines
    assert [dot.get_xydata()[0].tolist() for dot in dots] == [[1.0, 1.2], [2.0, 1.2], [3.0, pytest.approx(1.8)]]
    assert line.get_xydata()[-1].tolist() == [4.0, pytest.approx(1.8)]
    assert drawn["tune.png"].axes[1].get_xlabel() == "minute of the search (below the picture: 1)"
