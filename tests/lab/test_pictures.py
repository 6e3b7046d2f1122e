"""A picture says what it is of, and every word in it can be read: the pictures of all committed results."""

import pytest
from conftest import ROOT

from lab import pictures
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
