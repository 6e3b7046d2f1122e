"""Startup: modules that take a second to load are loaded only by code that needs them."""

import subprocess
import sys

import pytest
from conftest import ROOT, flags

SCRIPT = """
import sys
import train, sample, evaluate, convert, lab.measure.modes, ladder
words = [f"--out_dir={sys.argv[1]}", "--device=cpu", "--dtype=float32"]
sample.main([*words, "--max_new_tokens=2"])
evaluate.main(words)
slow = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "matplotlib"
print([name for name in slow if name in sys.modules])
train.main(sys.argv[2:])
train.main([*sys.argv[2:], "--max_steps=3", "--init_from=resume"])
print([name for name in slow[:3] if name in sys.modules])  # matplotlib draws the loss
"""
OPERATORS = {"attention": "blocks", "loss_chunks": 1}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "adafactor", "lion"])
def test_nothing_loads_the_compiler_unless_something_is_compiled(optimizer, trained, dense, tmp_path):
    training = flags(dataset=dense, out_dir=tmp_path, optimizer=optimizer, max_steps=2, save_interval=1, **OPERATORS)
    command = [sys.executable, "-c", SCRIPT, trained.out_dir, *training]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in result.stdout.splitlines() if line.startswith("[")] == ["[]", "[]"]


PREPARE = """
import importlib, pathlib, sys
for path in pathlib.Path("data").glob("*/prepare.py"):
    importlib.import_module(".".join(path.with_suffix("").parts))
sys.modules["data.text.prepare"].main(["--input", "README.md", "--tokenizer=byte", f"--out_dir={sys.argv[1]}"])
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_preparing_a_dataset_does_not_load_torch(tmp_path):
    command = [sys.executable, "-c", PREPARE, tmp_path / "bytes"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False" and (tmp_path / "bytes" / "meta.json").exists()
