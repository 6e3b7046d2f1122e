"""Start-up: what takes a second to load is loaded only by what needs it."""

import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = """
import sys
import train, sample, evaluate, convert, lab.modes, lab.show
words = [f"--out_dir={sys.argv[1]}", "--device=cpu", "--dtype=float32"]
sample.main([*words, "--max_new_tokens=2"])
evaluate.main(words)
slow = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "matplotlib"
print([name for name in slow if name in sys.modules])
"""


@pytest.mark.slow
def test_neither_a_door_nor_eager_generation_nor_evaluation_loads_the_compiler(trained):
    command = [sys.executable, "-c", SCRIPT, trained.out_dir]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
