"""If one of several processes hangs, the others end and say which one, and where it was last heard of."""

import re

import pytest
from conftest import rows, words
from processes import configuration, work

pytestmark = pytest.mark.slow

PLACE = r"rank 1 on \S+, last heard of at step 3, in worker.py:\d+ fail"
KINDS = {  # number of processes, collective_timeout, line
    # A stopped process falls silent, whether or not the others, which wait for it, get a signal.
    "SIGSTOP": (4, 8, f"no word for 4 s from {PLACE}; the run ends"),
    "SIGSTOP, SIGTERM": (2, 600, f"no word for 3 s from {PLACE}; the run ends"),
    # One that sleeps beats on, but a message to it takes too long.
    "sleep": (2, 8, rf"a message between processes failed \(Timed out .*\): {PLACE}"),
    "exit": (2, 8, rf"a message between processes failed \(.*\): {PLACE}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_hangs_ends_the_others_and_one_line_names_it(kind, dense, documents, tmp_path):
    n, timeout, expected = KINDS[kind]
    config = configuration(dense, documents, tmp_path / "run", max_steps=1000, collective_timeout=timeout)
    result, _ = work(tmp_path / "work", {"job": {"argv": words(config), "fault": [1, 3, kind], "grace": 3}}, n)
    assert result.returncode == 1, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert re.fullmatch(f"error: {expected}. --init_from=auto continues from the newest checkpoint", line), line
    assert "Traceback" not in result.stderr


def test_the_slowest_process_stands_out_in_the_metrics(dense, documents, tmp_path):
    config = configuration(dense, documents, tmp_path / "run", max_steps=400, log_interval=50)
    result, _ = work(tmp_path / "work", {"job": {"argv": words(config), "grace": 1, "slow": [1, 1e6]}}, 2)
    assert result.returncode == 0, result.stderr
    last = rows(config)[-1]
    assert last["slowest_rank"] == 1 and last["slowest_product_ms"] == 1e6
    assert last["product_ms"] > 5e5  # of two, the median is the mean
