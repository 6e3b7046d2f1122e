"""sample_interval: a line of text on the way, which changes nothing of the training."""

import ast
import re
from pathlib import Path

import pytest
import torch
from conftest import LINE, replace, rows, same, saved, tiny, weights, write_folder
from processes import configuration, words, work

import sample
import train
from nanoladder.data.tokenizer import build_tokenizer, encode, load_tokenizer
from nanoladder.run.sample import LENGTH, write_line

CURVE = "train_loss", "val_loss", "lr", "grad_norm"


@pytest.fixture
def config(dense, tmp_path):
    """Dropout draws from the global random state in every step."""
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), dropout=0.2, max_steps=7, sample_interval=3)


def samples(config):
    return {row["step"]: row["sample"] for row in rows(config) if "sample" in row}


def test_samples_change_nothing_of_the_training(config, tmp_path):
    config = replace(config, eval_interval=2, log_interval=2, max_steps=12)
    without = replace(config, sample_interval=0, out_dir=str(tmp_path / "without"))
    train.train(config)
    train.train(without)
    assert list(samples(config)) == [3, 6, 9, 12] and not samples(without)
    curve = [row for row in rows(config, *CURVE) if row]  # but those of step 3 and 9, which hold a sample alone
    assert curve == rows(without, *CURVE)
    ours, theirs = saved(config), saved(without)
    assert all(same(ours[key], theirs[key]) for key in ("model", "optimizer", "generators"))


def test_the_text_is_that_of_sample_py(config, run_main):
    config = replace(config, max_steps=40, log_interval=20, sample_interval=20)
    train.train(config)
    words = f"--out_dir={config.out_dir}", "--checkpoint=last", "--device=cpu", "--dtype=float32"
    result = run_main(sample.main, *words, f"--seed={config.seed}", f"--max_new_tokens={LENGTH}")
    assert list(samples(config)) == [20, 40]
    assert len(samples(config)[40]) == LENGTH and result.out == samples(config)[40] + "\n"


def test_a_sample_is_one_line_with_line_breaks_as_escapes(config, run_main):
    config = replace(config, max_steps=60, log_interval=0, sample_interval=60, dropout=0.0)
    lines = run_main(train.main, *words(config)).out.splitlines()
    assert "\n" in samples(config)[60]  # the model knows its line, which ends
    (line,) = [line for line in lines if "  sample " in line]
    assert ast.literal_eval(re.fullmatch(r"step    60  sample (.*)", line)[1]) == samples(config)[60]


@pytest.mark.parametrize(
    "keys",
    [
        {"pad_vocab_to": 64, "attention": "sdpa", "lazy_metrics": True, "checkpointing": "every:1"},
        {"dtype": "bfloat16", "loss_chunks": 2, "micro_batch_size": 2},
        pytest.param({"compile": True, "compile_scope": "block"}, marks=pytest.mark.slow),
    ],
)
def test_with_the_stages_of_the_ladder(keys, config):
    train.train(replace(config, **keys))
    assert [len(text) for text in samples(config).values()] == [LENGTH] * 3


@pytest.mark.slow
def test_several_processes_write_as_one_does(dense, documents, tmp_path):
    kinds = {
        "copies": {},
        "shards": {"shard": "full"},
        "tensor": {"tensor_parallel": 2},
        "pipeline": {"pipeline_parallel": 2, "micro_batch_size": 2},
        "context": {"context_parallel": 2, "attention": "sdpa"},
    }
    keys = {"sample_interval": 3, "log_interval": 3}
    runs = {kind: configuration(dense, documents, tmp_path / kind, **keys, **more) for kind, more in kinds.items()}
    result, _ = work(tmp_path, {kind: {"argv": words(run)} for kind, run in runs.items()}, n=2)
    assert result.returncode == 0, result.stderr
    alone = configuration(dense, documents, tmp_path / "alone", **keys)
    train.train(alone)
    assert samples(alone).keys() == {3, 6}
    assert {kind: samples(run) for kind, run in runs.items()} == dict.fromkeys(kinds, samples(alone))
    assert result.stdout.count("  sample '") + result.stdout.count('  sample "') == 2 * len(kinds)


def test_weights_that_are_not_finite_write_nothing(config):
    train.train(config)
    model = train.GPT(replace(config, vocab_size=saved(config)["config"]["vocab_size"]))
    model.load_state_dict(weights(config))
    tokenizer = load_tokenizer(config.out_dir)
    assert write_line(model, tokenizer, model.config) == samples(config)[7]
    with torch.no_grad():
        model.norm.weight.fill_(torch.inf)
    assert write_line(model, tokenizer, model.config) is None


def test_a_dataset_without_tokenizer_is_refused(config, tmp_path, refused):
    tokenizer = build_tokenizer("char", [LINE])
    ids = encode(tokenizer, LINE * 20)
    folder = write_folder(tmp_path / "bare", ids, ids, tokenizer.n_vocab)
    line = refused(train.main, *words(replace(config, dataset=str(folder))))
    assert all(part in line for part in ("bare", "tokenizer.json", "--sample_interval=0")), line
    assert not Path(config.out_dir).exists()
