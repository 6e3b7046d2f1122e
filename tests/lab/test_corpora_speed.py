"""The measurement of large corpora: a small one runs, each part in a process of its own."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.nightly
def test_a_small_measurement_is_a_whole_table():
    command = [sys.executable, "-m", "lab.corpora", "--megabytes=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r"\| [^-]", line)]
    figures = [float(re.search(r"\| ([0-9.]+) (MB/s|GB|s)\b", row)[1]) for row in rows if re.search("[0-9]", row)]
    assert len(figures) == 5 and figures[0] > 0 and figures[1] > 0 and 0 < figures[2] < 2
