"""config/finetune_shakespeare.py, scaled down: from a GPT-2 of transformers or a checkpoint, on a shorter context."""

import pytest
import torch
from conftest import ROOT, rows, tiny, weights
from transformers import GPT2Config, GPT2LMHeadModel

import train
from nanoladder import checkpoint
from nanoladder.run import load_config

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32}
PRESET = ROOT / "config" / "finetune_shakespeare.py"


VOCABULARIES = {"dense": 17, "documents": 256}


@pytest.fixture(params=VOCABULARIES)
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["hf", "checkpoint"])
def source(request, folder, tmp_path):
    """init_from of a model with 16 positions, for the data in the folder."""
    if request.param == "hf":
        torch.manual_seed(0)
        config = GPT2Config(**SHAPE, n_positions=16, vocab_size=VOCABULARIES[folder.name])
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
        return f"hf:{tmp_path / 'gpt2'}"
    own = tiny(**SHAPE, bias=True, dataset=str(folder), out_dir=str(tmp_path / "own"), max_steps=1)
    train.train(own)
    return f"{own.out_dir}/last.safetensors"


def finetuned(name, init_from, folder, dataset, **keys):
    """Runs the preset on a small model; returns its config."""
    small = {"context_length": 8, "batch_size": 4, "micro_batch_size": 2, "max_steps": 6}
    small |= {"compile": False, "num_workers": 0, "device": "cpu", "dtype": "float32", "learning_rate": 1e-2}
    small |= {"dataset": dataset, "out_dir": folder / name, "init_from": init_from}
    words = [str(PRESET), *(f"--{key}={value}" for key, value in (small | keys).items())]
    train.main(words)
    return load_config(words)


def test_the_preset_learns(source, folder, tmp_path):
    """From either source, on one stream of tokens and on padded documents."""
    start = finetuned("start", source, tmp_path, folder, learning_rate=0.0, max_steps=1)
    tuned = finetuned("tuned", source, tmp_path, folder, eval_interval=1)
    if folder.name == "dense":  # the documents are random bytes
        losses = [row["val_loss"] for row in rows(tuned)]
        assert losses[-1] < losses[0] < rows(start)[-1]["val_loss"]
    before, after = weights(start), weights(tuned)
    assert not any(torch.equal(after[name], weight) for name, weight in before.items())
    assert before["position_embedding.weight"].shape == (8, 32)


def test_the_preset_has_the_recipe_that_it_names(monkeypatch):
    """nanoGPT's: 32 sequences of 1024 tokens a step, 20 steps at a constant rate of 3e-5."""
    monkeypatch.setattr(checkpoint, "shape_of", lambda source: {})
    config = load_config([str(PRESET)])
    assert config.batch_size * config.context_length == 32 * 1024 and config.max_steps == 20
    assert {train.learning_rate(step, config) for step in range(1, 21)} == {3e-5}
