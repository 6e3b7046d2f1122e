"""convert.py writes a folder that transformers loads and from which training continues."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import LINE, needs_rustbpe, replace, rows, tiny, write_folder

import convert
import sample
import train
from nanoladder import checkpoint
from nanoladder.tokenizer.encoding import build_tokenizer, encode, end_of_text, load_tokenizer

SPEEDS = {"compile": False, "attention": "sdpa", "pad_vocab_to": 64}
TOKENIZERS = [pytest.param("bpe:270", marks=needs_rustbpe), "char"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def trained(request, tmp_path_factory):
    """A run with biases and a padded vocabulary, long enough to begin to learn its line."""
    folder = tmp_path_factory.mktemp("run")
    encoding = build_tokenizer(request.param, [LINE * 30])
    train_ids, val_ids = (encode(encoding, LINE * n) for n in (30, 8))
    write_folder(folder / "data", train_ids, val_ids, encoding.n_vocab, encoding=encoding)
    keys = {"bias": True, "max_steps": 40, "eval_interval": 20, "context_length": 40, **SPEEDS}
    config = tiny(dataset=str(folder / "data"), out_dir=str(folder / "run"), **keys)
    train.train(config)
    return config


@pytest.fixture(scope="module")
def converted(trained):
    """The folder that convert.py writes of that run."""
    folder = Path(trained.out_dir).with_name("hf")
    convert.main([f"--out_dir={trained.out_dir}", "--to=hf", f"--output={folder}", "--checkpoint=last"])
    return folder


def load(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def test_transformers_loads_model_and_tokenizer(trained, converted):
    theirs, tokenizer = load(converted)
    encoding = load_tokenizer(trained.out_dir)
    ids = encode(encoding, LINE)[:40]
    assert tokenizer(LINE).input_ids[:40] == ids and tokenizer.decode(ids) == encoding.decode(ids)
    assert tokenizer.model_max_length == theirs.config.n_positions == 40
    assert theirs.config.vocab_size == encoding.n_vocab
    assert {tokenizer.eos_token_id, theirs.config.eos_token_id, theirs.generation_config.eos_token_id} == {
        end_of_text(encoding)
    }
    ours = checkpoint.load_gpt(Path(trained.out_dir, "last.safetensors")).eval()
    tokens = torch.tensor([ids])
    expected = ours.logits(tokens)[..., : encoding.n_vocab]
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=1e-5)


def test_greedy_generation_matches_transformers_token_for_token(trained, converted, run_main):
    """For prompts of different lengths, batched by sample.py only; up to the end of the context."""
    theirs, tokenizer = load(converted)
    prompts, texts = ["the c", "on the mat, naïve at"], []
    ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    n = 40 - max(each.shape[1] for each in ids)
    for each in ids:
        options = {"max_new_tokens": n, "do_sample": False, "attention_mask": torch.ones_like(each)}
        texts.append(tokenizer.decode(theirs.generate(each, **options)[0]))
    assert all(text.startswith(prompt) and len(text) > 10 for text, prompt in zip(texts, prompts, strict=True))
    words = [f"--prompt={prompt}" for prompt in prompts] + ["--temperature=0", f"--max_new_tokens={n}"]
    expected = "".join(f"--- prompt {i}\n{text}\n" for i, text in enumerate(texts, 1))
    for source in ([f"--out_dir={trained.out_dir}", "--checkpoint=last"], [f"--model=hf:{converted}"]):
        assert run_main(sample.main, *source, *words, "--device=cpu", "--dtype=float32").out == expected


def test_a_prompt_that_ends_in_a_space_is_continued_and_printed_once(trained, run_main):
    words = [f"--out_dir={trained.out_dir}", "--device=cpu", "--temperature=0", "--max_new_tokens=8"]
    outs = [run_main(sample.main, *words, f"--prompt={prompt}").out for prompt in ("the", "the ")]
    assert all(out.startswith("the cat") for out in outs), outs


def test_training_continues_from_an_exported_model(trained, converted, tmp_path):
    """train -> export -> import -> train: the losses equal those of continuing from our own checkpoint's weights."""
    keys = {"max_steps": 6, "eval_interval": 3}
    losses = {}
    for source in (f"{trained.out_dir}/last.safetensors", f"hf:{converted}"):
        config = replace(trained, init_from=source, out_dir=str(tmp_path / str(len(losses))), **keys)
        train.train(config)
        losses[source] = rows(config, "train_loss", "val_loss", "grad_norm")
    ours, theirs = losses.values()
    assert ours == theirs and len(ours) == 6  # bit for bit


def test_the_best_checkpoint_is_exported_if_there_is_one(trained, tmp_path, run_main):
    words = [f"--out_dir={trained.out_dir}", f"--output={tmp_path}/hf"]
    result = run_main(convert.main, *words)
    assert "best.safetensors" in result.out and "no biases" not in result.out
    assert all(f"  {path.name} " in result.out for path in (tmp_path / "hf").iterdir())
    line = run_main(convert.main, *words)
    assert line.code == 2 and f"{tmp_path}/hf holds " in line.err and "choose another folder" in line.err


def test_a_run_without_a_tokenizer(trained, tmp_path, run_main):
    shutil.copy(Path(trained.out_dir, "last.safetensors"), tmp_path)
    result = run_main(convert.main, f"--out_dir={tmp_path}", f"--output={tmp_path}/hf")
    assert result.code == 0 and "no tokenizer" in result.out
    assert not list((tmp_path / "hf").glob("tokenizer*"))
