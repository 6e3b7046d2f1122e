"""The notebook is committed without outputs, and all of its cells run in a copy of this repository."""

import base64
import shutil

import pytest
from conftest import ROOT

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
NOT_COPIED = (".git", ".venv*", "out", "results", "tests", "__pycache__")
NOT_COPIED += ("*.bin", "meta.json", "tokenizer.json", "tokenizer.tiktoken", "counting_*")  # of prepared datasets


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_hold_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for found in notebook.cells:
        assert found.cell_type == "markdown" or (found.outputs == [] and found.execution_count is None), found.id


@pytest.mark.slow
def test_the_quickstart_runs_to_its_end(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for name, value in (("NOTEBOOK_SMALL", "1"), ("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(copy / "notebooks" / "quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(copy / "notebooks")}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources)
    client.execute()
    cells = {found.id: found for found in notebook.cells if found.cell_type == "code"}
    text = {name: "".join(output.get("text", "") for output in found.outputs) for name, found in cells.items()}
    assert "installed: nothing" in text["packages"] and "CPU" in text["sizes"]
    assert "vocabulary of 4,096" in text["data"]
    assert "parameters" in text["training"] and "bpb" in text["training"]
    assert text["sample"].startswith("def __init__(self")
    assert "+" in text["diff"] and "autocast" in text["diff"]
    assert "fused_adamw" in text["profile"] and "Fastest: " in text["profile"]
    (picture,), (table,) = cells["loss"].outputs, cells["table"].outputs
    assert len(base64.b64decode(picture.data["image/png"])) > 5000 and "| fused_adamw" in table.data["text/markdown"]
