"""A picture says what it is of, and every word in it can be read: the pictures of all committed results."""

import pytest
from conftest import ROOT

from lab import pictures
from lab.results import read_results

RESULTS = ROOT / "results"
MODES = {  # a file for each kind of mode
    mode: path.relative_to(RESULTS)
    for path in sorted(RESULTS.glob("*/*/results.json"))
    for mode in read_results(path)["modes"]
    if mode in ("ladder", "vary-attention")
}
MACHINES = {
    "amd-epyc-2-threads-bf16": "AMD EPYC, 2 threads, native bfloat16",
    "intel-xeon-2-threads-amx": "Intel Xeon, 2 threads, AMX",
}


def title(figure):
    return " ".join(figure.get_suptitle().split())


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_names_its_mode_config_and_machine(mode, drawn, tmp_path):
    results = read_results(RESULTS / MODES[mode])
    pictures.draw(results, mode, tmp_path / "x.png")
    assert title(drawn["x.png"]) == f"{mode}: {' '.join(results['config'])} {MACHINES[MODES[mode].parts[0]]}"


@pytest.mark.parametrize(
    "words", [[*(f"--key_{n}={n:010}" for n in range(20)), f"--dataset={'x' * 100}"], [r"--dataset=a$\fra{$"]]
)
def test_a_title_however_long_is_broken_into_lines_and_is_no_formula(words, drawn, tmp_path):
    results = read_results(RESULTS / "intel-xeon-2-threads-amx/reference/results.json") | {"config": words}
    pictures.draw(results, "ladder", tmp_path / "x.png")
    assert "".join(words).replace(" ", "") in title(drawn["x.png"]).replace(" ", "")
