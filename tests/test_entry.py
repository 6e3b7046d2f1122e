"""Output that cannot be written, and Ctrl-C: scripts end in a line or silently, and training saves."""

import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, flags, rows, saved, tiny

import evaluate
import train
from nanoladder import entry, machine

FULL = "/dev/full"
IMPORT = "from nanoladder.entry import Parser, run_script\n"
PRINT = IMPORT + "run_script(lambda argv: print('text'))"
HELP = IMPORT + "run_script(lambda argv: Parser().parse_args(['--help']))"
INTERRUPT = "__import__('os').kill(__import__('os').getpid(), 2)"


def run(code, stdout):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full")
def test_a_full_disk_is_one_line_and_a_closed_pipe_ends_a_script_silently():
    with open(FULL, "w") as full:
        result = run(HELP, full)
    assert result.returncode == 1
    assert result.stderr == "error: stdout cannot be written (No space left on device)\n"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        result = run(PRINT, pipe)
    assert (result.returncode, result.stderr) == (141, "")


SCRIPTS = [path for path in (*ROOT.glob("*.py"), *ROOT.glob("data/*/prepare.py")) if path.name != "model.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_finds_its_modules_from_any_folder_even_if_python_does_not_look_beside_it(script, tmp_path):
    (tmp_path / "link.py").symlink_to(script)
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, "link.py", "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("usage:")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_one_line():
    result = run(IMPORT + f"run_script(lambda argv: {INTERRUPT})", subprocess.DEVNULL)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 143])
def test_one_of_several_processes_exits_with_its_code_after_all_exit_handlers_and_frees_nothing(code):
    """An object held by a gloo thread sometimes aborts the process if it is freed while Python exits."""
    freed = "type('Freed', (), {'__del__': lambda self, abort=__import__('os').abort: abort()})()\n"
    before, later = (f"import atexit, sys\natexit.register(print, {name!r})\n" for name in ("before", "later"))
    script = f"{before}{IMPORT}{later}held = {freed}run_script(lambda argv: {code} and sys.exit({code}))"
    assert run(script, subprocess.PIPE).returncode == -signal.SIGABRT  # a single process frees it
    result = run(f"import os\nos.environ['WORLD_SIZE'] = '2'\n{script}", subprocess.PIPE)
    assert (result.returncode, result.stdout) == (code, "later\nbefore\n")


def test_each_line_is_flushed_at_once(tmp_path, monkeypatch):
    path, seen = tmp_path / "log", []

    def main(argv):
        print("step 1")
        seen.append(path.read_text())

    with open(path, "w") as log, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", log)
        entry.run_script(main)
    assert seen == ["step 1\n"]


class Broken(io.StringIO):
    """A pipe whose reader ends after the first line."""

    def write(self, text):
        if self.tell():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_training_saves_at_ctrl_c_even_if_it_also_ended_the_reader_of_its_output(dense, tmp_path, monkeypatch):
    config = tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), max_steps=9)
    step, write = train.train_step, os.write

    def interrupted(*args):
        if len(rows(config)) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    def refuse(descriptor, content):
        if descriptor == 2:
            raise BrokenPipeError(32, "Broken pipe")
        return write(descriptor, content)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(train, "train_step", interrupted)
        patch.setattr(os, "write", refuse)
        patch.setattr(sys, "stdout", Broken())
        patch.setattr(sys, "stderr", Broken())
        train.train(config)
    assert ended.value.code == 130 and saved(config)["progress"]["step"] == len(rows(config)) == 6


STREAMS = """
import os, subprocess, sys

def main(argv):
    with open(argv[0], "w") as file:
        print("to stdout")
        print(sys.stdin.read(), "to stderr", file=sys.stderr)
        os.write(2, b"to the descriptor, as a library in C")
        subprocess.run([sys.executable, "-c", "import sys; print(sys.stdin.fileno(), sys.stderr.fileno())"], check=True)
        file.write("alone")

run_script(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_nothing_is_printed_into_a_file_opened_after_a_standard_stream_was_closed(closed, tmp_path):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", IMPORT + STREAMS, str(tmp_path / "file")]
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "Error" not in result.stderr and result.returncode == 0
    assert (tmp_path / "file").read_text() == "alone"


@pytest.mark.parametrize("world_size", ["2", "two"])
def test_a_world_size_without_torchrun_is_bad_input(world_size, dense, tmp_path, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    for main, words in (train.main, flags(dataset=dense, out_dir=tmp_path / "run")), (evaluate.main, ["--device=cpu"]):
        assert "RANK=, LOCAL_RANK=, MASTER_ADDR=, MASTER_PORT=; expected torchrun" in refused(main, *words)
    assert not (tmp_path / "run").exists()


def test_an_empty_world_size_is_none(trained, monkeypatch, run_main):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert run_main(evaluate.main, f"--out_dir={trained.out_dir}", "--device=cpu").code == 0
    assert machine.free_memory(torch.device("cpu")) > 0


ENDED = """
import os, signal, sys
from nanoladder.entry import end_on_signals

def main(argv):
    signal.signal(signal.SIGHUP, signal.Handlers(int(argv[0])))
    end_on_signals()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        print("went on", flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)
        os.close(1)  # as a closed terminal
        print("removed a folder", flush=True)
        open(argv[1], "w").close()

run_script(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_ends_a_measurement_in_a_line_once_it_has_cleaned_up_unless_it_is_ignored(ignored, tmp_path):
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    command = [sys.executable, "-c", IMPORT + ENDED, str(int(handler)), str(tmp_path / "cleaned")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ignored:
        assert result.stdout == "went on\n"
    else:
        assert (result.returncode, result.stdout, result.stderr) == (129, "", "\nended by SIGHUP\n")
        assert (tmp_path / "cleaned").exists()
