"""sample.py samples according to its options, reproducibly, and prints complete characters."""

import io
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import LINE, ROOT, saved

import sample
from nanoladder.infer import CachedGPT
from nanoladder.tokenizer.encoding import build_tokenizer, save_tokenizer


@pytest.fixture
def text(trained, run_main):
    """text(*words): the output of sample.py for the trained run."""
    fixed = f"--out_dir={trained.out_dir}", "--device=cpu", "--dtype=float32", "--max_new_tokens=40"

    def run(*words):
        result = run_main(sample.main, *fixed, *words)
        assert result.code == 0, result.err
        return result.out

    return run


def test_a_seed_gives_the_same_text(text):
    first = text("--prompt=the", "--seed=1", "--temperature=1.5")
    assert first.startswith("the") and len(first) == 3 + 40 + 1
    assert text("--prompt=the", "--seed=1", "--temperature=1.5") == first
    assert text("--prompt=the", "--seed=2", "--temperature=1.5") != first


def test_another_tokenizer_in_a_run_s_folder_is_refused(trained, tmp_path, refused):
    folder = shutil.copytree(trained.out_dir, tmp_path / "run")
    save_tokenizer(build_tokenizer("char", [LINE.replace("c", "k")]), folder)
    line = refused(sample.main, f"--out_dir={folder}")
    assert str(folder) in line and "not the one that the model of" in line and "tokenizer.tiktoken" in line


@pytest.mark.parametrize("prompt", ["t", "the cat sat on the mat"])  # the second fills the context
def test_options_that_leave_one_candidate_give_the_likeliest_token(prompt, text):
    likeliest = text(f"--prompt={prompt}", "--temperature=0")
    assert all(text(f"--prompt={prompt}", word) == likeliest for word in ("--top_k=1", "--top_p=0.0001"))
    assert text(f"--prompt={prompt}", "--temperature=9") != likeliest


def test_batched_prompts_give_the_text_of_each_alone(text, tmp_path):
    (tmp_path / "file").write_bytes(b"at the cafe\n\n")
    options = "--seed=1", "--temperature=1.5", "--stop=s"
    prompts = "--prompt=the", "--prompt=the cat sat on the mat", f"--prompt_file={tmp_path / 'file'}", "--prompt=t"
    alone = [text(prompt, *options, f"--seed={seed}") for prompt in prompts for seed in (1, 2)]
    together = text(*prompts, *options, "--num_samples=2")
    order = [0, 1, 2, 3, 6, 7, 4, 5]  # files after texts
    names = [f"--- prompt {i}, sample {j}\n" for i in (1, 2, 3, 4) for j in (1, 2)]
    assert together == "".join(name + alone[place] for name, place in zip(names, order, strict=True))
    assert alone[4].startswith("at the cafe\n") and not alone[4].startswith("at the cafe\n\n\n")
    assert len({len(each) for each in alone}) > 3  # they end at different times
    named = text("--prompt=the", "--prompt=t", *options)
    assert named == f"--- prompt 1\n{alone[0]}--- prompt 2\n{alone[6]}"


def test_a_sample_ends_before_the_stop_text(text):
    whole = text("--prompt=the", "--temperature=0").removesuffix("\n")
    stop = whole[9:12]
    assert text("--prompt=the", "--temperature=0", f"--stop={stop}") == whole[: whole.index(stop, 3)] + "\n"
    assert text("--prompt=the", "--temperature=0", f"--stop={whole[3]}") == "the\n"  # the very first character


@pytest.fixture
def stdin(monkeypatch):
    """stdin(content): bytes that the next command line reads."""
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_a_prompt_from_stdin(text, stdin):
    stdin(b"the cat\n")
    assert text("--prompt=-", "--temperature=0") == text("--prompt=the cat", "--temperature=0")
    stdin(b"the cat")
    assert text("--prompt=-", "--temperature=0") == text("--prompt=the cat", "--temperature=0")
    stdin(b"")
    assert text("--prompt=-", "--temperature=0") == text("--temperature=0")


def test_an_empty_prompt_begins_a_document(text):
    assert text("--temperature=0") == text("--prompt=\n", "--temperature=0")[1:]


# -- how a run ends


@pytest.mark.parametrize(
    "error, code, line",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), 3, "error: out of memory; expected fewer"),
        (torch._dynamo.exc.BackendCompilerFailed(print, OSError("full"), None), 1, "error: torch.compile failed: full"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_interrupts_and_failures_end_in_one_line(error, code, line, trained, run_main, monkeypatch):
    def step(*arguments):
        raise error

    monkeypatch.setattr(CachedGPT, "step", step)
    monkeypatch.setattr(CachedGPT, "compile", lambda model: None)
    result = run_main(sample.main, f"--out_dir={trained.out_dir}", "--device=cpu", "--prompt=the", "--compile")
    text = result.err or str(result.code)
    assert text.startswith(line) and text.count("\n") <= 1
    assert result.code in (code, text) and result.out.startswith("the")


def test_a_cache_larger_than_the_memory_is_refused(trained, refused, monkeypatch):
    monkeypatch.setattr(sample, "CachedGPT", None)
    words = f"--out_dir={trained.out_dir}", "--device=cpu", "--num_samples=1000000000", "--dtype=bfloat16"
    line = refused(sample.main, *words)
    n_logits = saved(trained)["config"]["vocab_size"]
    needed = (2 * 2 * 32 * 16 + n_logits) * 2  # keys and values of 2 layers, 32 channels, 16 tokens; in 2 bytes
    assert f" need {needed:,.1f} GB" in line and "fewer samples" in line


# -- interactive


def test_lines_from_a_pipe_are_continued_one_after_another(trained, text, stdin, run_main):
    words = f"--out_dir={trained.out_dir}", "--device=cpu", "--dtype=float32", "--max_new_tokens=40", "--interactive"
    stdin("the\n\nЖ\n".encode() + b"at the\n" + b"t" * 20)
    result = run_main(sample.main, *words)
    assert result.code == 0
    assert result.out == "".join(text(f"--prompt={prompt}") for prompt in ("the", "", "at the", "t" * 20))
    errors = result.err.splitlines()
    assert len(errors) == 2 and "'Ж'" in errors[0] and "20 tokens" in errors[1]


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_sample_and_not_the_interactive_program(trained):
    words = f"--out_dir={trained.out_dir}", "--device=cpu", "--max_new_tokens=10000000", "--interactive"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "sample.py", *words], cwd=ROOT, **pipes) as process:
        for line in (b"the cat\n", b"at\n"):
            process.stdin.write(line)
            process.stdin.flush()
            seen = b"\n"
            while b"\n" + line.strip() not in seen:  # after the previous sample, which is streamed
                seen += process.stdout.read1(100)
            process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.wait(60) == 0


# -- bad input


def test_prompts_that_are_not_utf8_are_refused(trained, refused, stdin, tmp_path):
    words = [f"--out_dir={trained.out_dir}"]
    (tmp_path / "file").write_bytes(b"the\xffcat")
    assert "position 3" in refused(sample.main, *words, f"--prompt_file={tmp_path / 'file'}")
    assert "position 3" in refused(sample.main, *words, "--prompt=the\udcff")  # as Python decodes the byte
    stdin(b"the\xff")
    assert "expected text in UTF-8" in refused(sample.main, *words, "--prompt=-")
