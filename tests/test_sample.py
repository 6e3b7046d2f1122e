"""sample.py samples according to its options, reproducibly, and prints complete characters."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import LINE, needs_rustbpe, replace, saved, tiny

import sample
import train
from model import GPT
from nanoladder import checkpoint
from nanoladder.data.tokenizer import build_tokenizer, encode, load_tokenizer, save_tokenizer
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

    def run(*words):
        result = run_main(sample.main, f"--out_dir={trained.out_dir}", "--device=cpu", "--max_new_tokens=40", *words)
        assert result.code == 0 and result.err == ""
        return result.out

    return run


def likeliest(config, prompt, n):
    """The prompt continued by the likeliest tokens, beyond the context length too."""
    state = saved(config)
    model = GPT(replace(config, vocab_size=state["config"]["vocab_size"])).eval()
    checkpoint.load_weights(model, checkpoint.load(Path(config.out_dir, "last.safetensors")), "last.safetensors")
    tokenizer = load_tokenizer(config.out_dir)
    tokens = list(encode(tokenizer, prompt))
    with torch.no_grad():
        for _ in range(n):
            logits = model.logits(torch.tensor([tokens[-config.context_length :]]))
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


def test_the_head_sees_the_last_position_alone(trained):
    """The tokens are the same as with the logits of all positions."""
    model, prompt, rows = checkpoint.load_gpt(Path(trained.out_dir, "last.safetensors")).eval(), [3, 1, 4, 1, 5], []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    options = SimpleNamespace(temperature=1.0, top_k=0, top_p=0.95, max_new_tokens=40)
    generator = torch.Generator().manual_seed(1)
    ours = list(sample.generate(model, prompt, model.config.vocab_size, options, generator))
    assert rows == 40 * [1]
    hook.remove()
    tokens, generator = list(prompt), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(40):
            logits = model.logits(torch.tensor([tokens[-trained.context_length :]]))[0, -1]
            tokens.append(int(sample.draw(logits, options, generator)))
    assert tokens == prompt + ours


def test_an_empty_prompt_begins_a_document(text, trained):
    assert text("--temperature=0") == likeliest(trained, "\n", 40)[1:] + "\n"


def test_a_character_that_the_tokenizer_does_not_know(trained, refused):
    line = refused(sample.main, f"--out_dir={trained.out_dir}", "--prompt=the Ж")
    assert "'Ж'" in line and "char" in line


def test_the_dataset_may_be_gone(trained):
    assert {"tokenizer.json", "tokenizer.tiktoken"} <= {path.name for path in Path(trained.out_dir).iterdir()}


class Pieces(io.StringIO):
    """Keeps the text of each write."""

    def __init__(self):
        self.pieces = []

    def write(self, piece):
        self.pieces.append(piece)


def stream(ids, folder, monkeypatch):
    """The texts that sample.py writes, one for each write, for the given ids."""
    model = torch.nn.Identity()
    model.config = tiny(vocab_size=260)
    monkeypatch.setattr(checkpoint, "load_gpt", lambda *arguments: model)
    monkeypatch.setattr(sample, "generate", lambda *arguments: iter(ids))
    monkeypatch.setattr(sys, "stdout", pieces := Pieces())
    sample.main([f"--out_dir={folder}", "--prompt=a"])
    return [piece for piece in pieces.pieces if piece]


def test_characters_of_several_tokens_are_streamed_whole(tmp_path, monkeypatch):
    save_tokenizer(build_tokenizer("byte"), tmp_path)
    pieces = stream("é☕x😀".encode(), tmp_path, monkeypatch)
    assert pieces == ["a", "é", "☕", "x", "😀", "\n"]  # each as soon as it is whole


def test_half_a_character_is_marked_as_such(tmp_path, monkeypatch):
    save_tokenizer(build_tokenizer("byte"), tmp_path)
    assert "".join(stream("x☕".encode()[:-1], tmp_path, monkeypatch)) == "ax\ufffd\n"
    assert "".join(stream(b"\x80x", tmp_path, monkeypatch)) == "a\ufffdx\n"


@needs_rustbpe
def test_the_end_of_the_text_ends_the_sample(tmp_path, monkeypatch):
    tokenizer = build_tokenizer("bpe:260", [LINE * 20])
    save_tokenizer(tokenizer, tmp_path)
    ids = [*encode(tokenizer, "the"), 259, *encode(tokenizer, "cat")]
    assert "".join(stream(ids, tmp_path, monkeypatch)) == "athe\n"


# -- drawing


def drawn(probabilities, n=400, **options):
    options = SimpleNamespace(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options})
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor(probabilities).log()
    tokens = [int(sample.draw(logits.clone(), options, generator)) for _ in range(n)]
    return [tokens.count(token) / n for token in range(len(probabilities))]


PROBABILITIES = [0.15, 0.5, 0.05, 0.3]


@pytest.mark.parametrize(
    "options, allowed",
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.49}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.79}, {1, 3}),
        ({"top_p": 0.9}, {0, 1, 3}),
        ({"top_p": 0.6, "top_k": 3}, {1, 3}),
        ({"top_p": 0.9, "top_k": 2}, {1, 3}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of the two that are left, the first has 0.625
        ({"temperature": 0}, {1}),
    ],
    ids=str,
)
def test_which_tokens_can_be_drawn(options, allowed):
    shares = drawn(PROBABILITIES, **options)
    assert {token for token, share in enumerate(shares) if share} == allowed
    total = sum(PROBABILITIES[token] for token in allowed)
    if options.get("temperature", 1):
        expected = [PROBABILITIES[token] / total if token in allowed else 0 for token in range(4)]
        assert shares == pytest.approx(expected, abs=0.08)


def test_temperature_sharpens_and_flattens():
    cold, hot = drawn(PROBABILITIES, temperature=0.5), drawn(PROBABILITIES, temperature=100.0)
    squares = [p * p for p in PROBABILITIES]
    assert cold == pytest.approx([square / sum(squares) for square in squares], abs=0.08)
    assert hot == pytest.approx([0.25] * 4, abs=0.08)


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
    words = [f"--out_dir={tmp_path}", "--temperature=0", "--prompt=the", "--max_new_tokens=4", "--device=cpu"]
    assert run_main(sample.main, *words).out == "the" + "\n" * 4 + "\n"
    assert run_main(sample.main, *words, "--checkpoint=last").out == likeliest(trained, "the", 4) + "\n"


def test_a_vocabulary_larger_than_the_tokenizers(dense, tmp_path, run_main):
    train.train(tiny(dataset=str(dense), out_dir=str(tmp_path), vocab_size=500, max_steps=1))
    words = [f"--out_dir={tmp_path}", "--temperature=2", "--top_p=1", "--device=cpu"]
    assert run_main(sample.main, *words).code == 0


@pytest.mark.parametrize("options", [{"top_p": 1e-60}, {"temperature": 1e-60}])
def test_tiny_options_draw_the_likeliest(options):
    assert drawn(PROBABILITIES, n=1, **options) == [0, 1, 0, 0]
