"""Bad input to a script is one line that says what was expected, and exit code 2; nothing is written."""

import errno
import re

import pytest

import convert
import evaluate
import sample
from data.openwebtext import prepare as openwebtext
from data.python_stdlib import prepare as python_stdlib
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as own_text
from lab.measure import modes as profile
from nanoladder.errors import reading

# (script, words of its command line, part of the line); the keys of train.py are in tests/config
REFUSED = [
    (sample, "--promt=x", "--promt=x, did you mean '--prompt'?; --help"),
    (sample, "--num-samples", "--num-samples, did you mean '--num_samples'?; --help"),
    (sample, "--out_dir=nowhere", "no such folder"),
    (sample, "--out_dir=", "argument --out_dir: no value given; --help"),
    (sample, "--out_dir=README.md", "a file; expected its folder, --out_dir=."),
    (sample, "--model=config", "is a folder; expected --model=hf:config"),
    (sample, "config", "unrecognized arguments: config, did you mean '--out_dir=config'?; --help"),
    (sample, "out_dir=x", "out_dir=x, did you mean '--out_dir=x'?; --help"),
    (sample, "--prompt def main", "main, expected --option=value, in quotes if it has spaces; --help"),
    (sample, "--num_samples", "expected one argument, as in --num_samples=VALUE; --help"),
    (sample, "--top_k=few", "argument --top_k: expected a whole number, not 'few'; --help"),
    (sample, "--temperature=inf", "temperature: expected 0 or more, and finite"),
    (sample, "--model=hf:gpt2 --checkpoint=last", "--checkpoint=last is for a run"),
    (sample, "--max_new_tokens=0", "max_new_tokens: expected at least 1"),
    (sample, "--temperature=nan", "temperature: expected 0 or more"),
    (sample, "--top_p=1.1", "top_p: expected above 0, up to 1"),
    (sample, "--device=tpu", "auto, cpu, cuda"),
    (sample, "--prompt_file=nowhere", "No such file"),
    (sample, "--prompt=Ж", "'Ж'"),
    (sample, "--interactive --prompt=a", "interactive: expected no prompts"),
    (sample, "--quantize=int8", "expected --compile"),
    (sample, "--quantize=int8 --compile --num_samples=2", "expected --compile, one prompt and --num_samples=1"),
    (evaluate, "--split=test", "(choose from 'val', 'train'); --help"),  # not "did you mean 'best'", of --checkpoint
    (evaluate, "--split=trian", "'train'), did you mean 'train'?; --help"),
    (evaluate, "--batch_tokens=0", "batch_tokens: expected at least 1"),
    (evaluate, "--context_length=17", "context_length"),
    (evaluate, "--stride=17", "stride=17: expected 1 to context_length=16"),
    (evaluate, "--output=no/such/folder.json", "expected a file in an existing folder"),
    (evaluate, "--dataset=nowhere", "no train.bin"),
    (evaluate, "--tasks missing.jsonl", "expected a JSONL file"),
    (evaluate, "--tasks x.jsonl --split=train", "split, stride: expected --dataset=NAME too"),
    (python_stdlib, "--tokenizer=bpe:12", "bpe:12"),
    (python_stdlib, "--tokenizer=bpe:4k", "bpe:4k"),
    (python_stdlib, "--tokenizer=bpe:99999999999", "257 to 999999999"),  # rustbpe would overflow
    (openwebtext, "--tokenizer=char", "--tokenizer=char"),
    (own_text, "", "--input"),
    (own_text, "--input no/such/file", "no/such/file"),
    (own_text, "--input {tmp}/latin.txt", "latin.txt: not text"),
    (shakespeare_char, "--input={tmp}/empty.txt", "the text is empty"),
]


HOME = [  # options that name a path
    (sample, "--out_dir=~/x"),
    (sample, "--model=hf:~/x"),
    (sample, "--prompt_file=~/x"),
    (evaluate, "--dataset=~/x"),
    (evaluate, "--tasks=~/x"),
    (convert, "--out_dir=~/x --output=y"),
    (convert, "--output=~/held"),
    (own_text, "--input=~/x"),
    (shakespeare_char, "--input=~/x"),
    (shakespeare_char, "--input=~/held/x --out_dir=~/run"),
    (python_stdlib, "--tokenizer=~/held"),
    (profile, "--mode=race --against=~/x"),
    (profile, "--mode=peers --nanogpt=~/x"),
]


@pytest.mark.parametrize("script, words", HOME)
def test_a_path_may_begin_at_home(script, words, trained, tmp_path, monkeypatch, refused):
    """Shells replace ~ in a word, but not in --option=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "x").write_text("a text\n" * 9)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    if script in (sample, evaluate, convert) and not re.search("--model|--out_dir", words):
        words += f" --out_dir={trained.out_dir}"
    assert f"{tmp_path}/" in refused(script.main, *words.split())


def test_a_prompt_is_no_path(trained, tmp_path, monkeypatch, refused):
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (["--prompt=~/x"], ["--prompt", "x=~/x"]):
        assert "'/'" in refused(sample.main, f"--out_dir={trained.out_dir}", "--device=cpu", *words)


@pytest.mark.parametrize("script, words, fragment", REFUSED)
def test_bad_input_is_one_line(script, words, fragment, trained, tmp_path, refused):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").touch()
    given = words.format(tmp=tmp_path).split()
    if script not in (sample, evaluate):
        given.append(f"--out_dir={tmp_path}/new")
    elif "--model" not in words:
        given = [f"--out_dir={trained.out_dir}", "--device=cpu", *given]
    assert fragment in refused(script.main, *given) and not list(tmp_path.glob("new/*"))


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_a_file_for_which_there_is_no_memory_is_not_called_damaged(error):
    with pytest.raises(type(error)), reading("x is damaged", "prepare it again"):
        raise error
