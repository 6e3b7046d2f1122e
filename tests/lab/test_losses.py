"""Head and loss by themselves: every variant computes the same loss, and a row that cannot run says why."""

import pytest
import torch
from conftest import tiny

from lab import climb, limits, losses

SHAPES = {"vocab_size": 3000, "n_embd": 16, "batch_size": 8, "dtype": "float32", "pad_vocab_to": 64}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(limits, "WINDOW", 1e-9)


@pytest.mark.parametrize("variant", [name for name, (_, compiled) in losses.VARIANTS.items() if not compiled])
def test_every_variant_computes_the_same_loss(variant):
    if variant == "Liger" or (variant == "linear_cross_entropy" and not hasattr(torch.nn.functional, variant)):
        pytest.skip("needs a GPU, or a later PyTorch")
    found, whole = (losses.measure(tiny(**SHAPES), name) for name in (variant, "cross_entropy"))
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert found["seconds"] >= 0


def test_chunks_take_less_memory_than_the_whole():
    whole, eight = (losses.measure(tiny(**SHAPES), name)["bytes"] for name in ("cross_entropy", "head_loss, 8 chunks"))
    logits = 4 * 8 * 16 * 3008
    assert whole > 2 * logits and eight < logits


def test_the_table_has_a_row_for_every_variant(dense, monkeypatch, tmp_path, capsys):
    few = {name: losses.VARIANTS[name] for name in ("cross_entropy", "Liger", "head_loss, 8 chunks")}
    monkeypatch.setattr(losses, "VARIANTS", few)
    words = [
        f"--{key}={value}"
        for key, value in (SHAPES | {"n_head": 2, "context_length": 16, "device": "cpu", "dataset": dense}).items()
    ]
    climb.main([*words, "--mode=losses", "--repeats=2", f"--out_dir={tmp_path}"])
    text = (tmp_path / "losses.md").read_text()
    assert text in capsys.readouterr().out
    assert "128 tokens, vocabulary 3000, width 16" in text
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in text.splitlines()[4:]}
    assert list(rows) == list(few)
    if not torch.cuda.is_available():
        assert rows["Liger"][0].startswith("Liger: ")
    assert float(rows["head_loss, 8 chunks"][1]) <= float(rows["cross_entropy"][1])
