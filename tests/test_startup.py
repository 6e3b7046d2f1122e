"""Startup: modules that take a second to load are loaded only by code that needs them."""

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
def test_neither_imports_nor_eager_generation_nor_evaluation_load_the_compiler(trained):
    command = [sys.executable, "-c", SCRIPT, trained.out_dir]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
