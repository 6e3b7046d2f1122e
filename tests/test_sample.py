"""sample.py samples according to its options, reproducibly, and prints complete characters."""

from pathlib import Path

import pytest
import torch
from conftest import replace, saved, tiny

import sample
import train
from model import GPT
from nanoladder import checkpoint
from nanoladder.data.tokenizer import encode, load_tokenizer
from nanoladder.run import metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory, dense):
    """A run on characters, long enough to begin to know its line."""
    config = tiny(dataset=str(dense), out_dir=str(tmp_path_factory.mktemp("run")), max_steps=30, batch_size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *arguments: None)
        train.train(config)
    return config


@pytest.fixture
def text(trained, run_main):
    """text(*words): the output of sample.py for the trained run."""
    fixed = f"--out_dir={trained.out_dir}", "--device=cpu", "--dtype=float32", "--max_new_tokens=40"

    def run(*words):
        result = run_main(sample.main, *fixed, *words)
        assert result.code == 0, result.err
        return result.out

    return run


def likeliest(config, prompt, n):
    """The prompt continued by the likeliest tokens, beyond the context length too: then half of the window stays."""
    state = saved(config)
    model = GPT(replace(config, vocab_size=state["config"]["vocab_size"])).eval()
    checkpoint.load_weights(model, checkpoint.load(Path(config.out_dir, "last.safetensors")), "last.safetensors")
    tokenizer = load_tokenizer(config.out_dir)
    tokens = list(encode(tokenizer, prompt))
    start, size = max(0, len(tokens) - config.context_length), config.context_length
    with torch.no_grad():
        for _ in range(n):
            if len(tokens) - start > size:
                start = len(tokens) - size // 2
            logits = model.logits(torch.tensor([tokens[start:]]))
            tokens.append(int(logits[0, -1, : tokenizer.n_vocab].argmax()))
    return tokenizer.decode(tokens)


def test_a_seed_gives_the_same_text(text):
    first = text("--prompt=the", "--seed=1", "--temperature=1.5")
    assert first.startswith("the") and len(first) == 3 + 40 + 1
    assert text("--prompt=the", "--seed=1", "--temperature=1.5") == first
    assert text("--prompt=the", "--seed=2", "--temperature=1.5") != first


def test_samples_of_a_run_have_seeds_of_their_own(text):
    both = text("--prompt=the", "--seed=1", "--num_samples=2", "--temperature=1.5")
    one, two = (text("--prompt=the", f"--seed={seed}", "--temperature=1.5") for seed in (1, 2))
    assert both == f"--- sample 1\n{one}--- sample 2\n{two}"


@pytest.mark.parametrize("words", [["--temperature=0"], ["--top_k=1"], ["--top_p=0.0001"], ["--temperature=0.0001"]])
@pytest.mark.parametrize("prompt", ["t", "the cat sat on the mat"])  # the second fills the context
def test_the_least_of_chance_is_the_likeliest_token(words, prompt, text, trained):
    assert text(f"--prompt={prompt}", *words) == likeliest(trained, prompt, 40) + "\n"


def test_an_empty_prompt_begins_a_document(text, trained):
    assert text("--temperature=0") == likeliest(trained, "\n", 40)[1:] + "\n"


def test_a_character_that_the_tokenizer_does_not_know(trained, refused):
    line = refused(sample.main, f"--out_dir={trained.out_dir}", "--prompt=the Ж")
    assert "'Ж'" in line and "char" in line


def test_the_dataset_may_be_gone(trained):
    assert {"tokenizer.json", "tokenizer.tiktoken"} <= {path.name for path in Path(trained.out_dir).iterdir()}


# -- bad input


@pytest.mark.parametrize(
    "word, named",
    [
        ("--out_dir=nowhere", ["out_dir=nowhere", "no such folder"]),
        ("--checkpoint=newest", ["checkpoint=newest", "best or last"]),
        ("--num_samples=0", ["num_samples", "at least 1"]),
        ("--max_new_tokens=0", ["max_new_tokens", "at least 1"]),
        ("--temperature=-1", ["temperature", "0 or more"]),
        ("--temperature=nan", ["temperature", "0 or more"]),
        ("--top_k=-1", ["top_k", "0 or more"]),
        ("--top_p=0", ["top_p", "up to 1"]),
        ("--top_p=1.1", ["top_p", "up to 1"]),
        ("--device=tpu", ["device=tpu", "auto, cpu, cuda"]),
    ],
)
def test_bad_options(word, named, trained, refused):
    line = refused(sample.main, f"--out_dir={trained.out_dir}", word)
    assert all(part in line for part in named), line


@pytest.mark.parametrize("word", ["--temperature=hot", "--top_q=1", "x"])
def test_words_that_are_not_options_are_one_line(word, refused):
    refused(sample.main, word)


def test_a_folder_without_a_run(tmp_path, refused):
    assert "no checkpoint at" in refused(sample.main, f"--out_dir={tmp_path}")


def test_a_damaged_checkpoint(trained, tmp_path, refused):
    (tmp_path / "last.safetensors").write_bytes(Path(trained.out_dir, "last.safetensors").read_bytes()[:-100])
    assert "damaged" in refused(sample.main, f"--out_dir={tmp_path}")


def test_a_run_without_a_tokenizer(trained, tmp_path, refused):
    (tmp_path / "last.safetensors").write_bytes(Path(trained.out_dir, "last.safetensors").read_bytes())
    assert "tokenizer" in refused(sample.main, f"--out_dir={tmp_path}")


def test_best_is_taken_if_there_is_one(trained, tmp_path, run_main):
    for name in ("last.safetensors", "tokenizer.json", "tokenizer.tiktoken"):
        (tmp_path / name).write_bytes(Path(trained.out_dir, name).read_bytes())
    state = saved(trained)
    state["model"]["norm.weight"].zero_()  # every logit is 0: the first token, a newline, is the likeliest
    checkpoint.write_file(tmp_path / "best.safetensors", state)
    words = [f"--out_dir={tmp_path}", "--temperature=0", "--prompt=the", "--max_new_tokens=4"]
    words += ["--device=cpu", "--dtype=float32"]
    assert run_main(sample.main, *words).out == "the" + "\n" * 4 + "\n"
    assert run_main(sample.main, *words, "--checkpoint=last").out == likeliest(trained, "the", 4) + "\n"


def test_a_vocabulary_larger_than_the_tokenizers(dense, tmp_path, run_main):
    train.train(tiny(dataset=str(dense), out_dir=str(tmp_path), vocab_size=500, max_steps=1))
    words = [f"--out_dir={tmp_path}", "--temperature=2", "--top_p=1", "--device=cpu"]
    assert run_main(sample.main, *words).code == 0
