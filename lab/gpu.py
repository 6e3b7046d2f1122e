"""Takes all measurements that need an NVIDIA GPU, part by part: bash lab/gpu.sh [--minutes=9]

Each part is a command with its own log and results; repeated, this command runs the remaining parts. A part
that lacks a package or a dataset is skipped. The exit code is 1 if something is wrong; a part that was skipped or ran
out of time does not count as wrong.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from lab.measure.cli import positive
from lab.measure.peers.task import CHECKOUTS
from lab.measure.results import ROOT, code_hash
from lab.measure.runs import RUNS, Failed, Runs
from nanoladder.entry import Parser, end_on_signals, run_script
from nanoladder.errors import BadInput

DONE = "done"  # the state of a finished part
BAD_INPUT = 2  # exit code of nanoladder.entry
GRACE = 10  # seconds that a part has to end
SHARE = 0.4  # of the minutes: the most that a part may take
SHOWN = 40  # lines of a log, at most
FAULT, MISSING = re.compile(r"WRONG|Error: |exit code|killed by the system"), "No module named"
TINY = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=32", "--batch_size=4"]
TINY += ["--micro_batch_size=0", "--compile=False"]
REHEARSED = {  # a word of a command: words that shorten its rehearsal; of an option given twice, the last counts
    "train.py": ["--max_steps=20", "--eval_windows=8"],
    "profile.py": ["--minutes=0.1"],
    "--mode=ladder": ["--stages=naive,flash"],
    "--vary": ["--vary", "attention=matmul,sdpa"],
    "--train": ["--max_steps=6"],
}


def parts(**checkouts):
    """Returns {part: arguments to `python`, without the folder} in order of value. checkouts: {peer: path, or None}."""
    reference, gpt2 = "profile.py config/reference.py", "profile.py config/gpt2.py"
    ladder, finished = "--mode=ladder --minutes=3", "--minutes=2 --vary"
    bytewise, subwords = "--dataset=python_stdlib_byte", "--dataset=python_stdlib_bpe50257"
    speed = "--stages=naive,tf32,amp,flash,fused_adamw,pad_vocab,compile,chunked_loss,cuda_graph,half_residual"
    small = "profile.py config/recipe_small.py --dataset=python_stdlib --n_embd=192 --n_head=4"
    optimizers = "optimizer=adamw,adamw8bit,sgd,lion,muon,adafactor,galore learning_rate=6e-4,2e-3,6e-3"
    batch_32 = "--batch_size=32 --micro_batch_size=32"
    batch_16 = "--batch_size=16 --micro_batch_size=16"
    batch_64 = "--batch_size=64 --micro_batch_size=64"
    beside = "".join(f" --{peer}={path}" for peer, path in checkouts.items() if path)
    tests = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    tests = " ".join(path for path in tests if "needs_gpu" in (ROOT / path).read_text())  # others take time to import
    commands = {
        "tests": f"-m pytest -v -n 8 --dist=worksteal -m gpu {tests}",
        "reference-50257": f"{reference} {subwords} {ladder}",
        "reference-256": f"{reference} {bytewise} {ladder} --stages=naive,compile,chunked_loss,cuda_graph",
        "gpt2": f"{gpt2} {subwords} {ladder} {speed} {batch_32}",
        "peers": f"{gpt2} {subwords} {batch_32} --mode=peers --minutes=3{beside}",
        "attention": f"{reference} {subwords} {finished} attention=matmul,flash,cudnn",
        "gpt2-batch-64": f"{gpt2} {subwords} {batch_64} {finished} micro_batch_size=32",
        "float8": f"{gpt2} {subwords} {batch_32} {finished} float8=True",
        "float8-large": f"profile.py config/gpt_1_5b.py {subwords} {batch_16} {finished} float8=True",
        "loss-chunks": f"{reference} {subwords} {finished} loss_chunks=0,2,8,32",
        "train-shakespeare": "train.py config/shakespeare_char.py --dataset=shakespeare_char --init_from=auto",
        "train-reference": f"train.py config/reference.py {bytewise} --init_from=auto",
        "gpt2-low-memory": f"profile.py config/gpt2_low_memory.py {subwords} {ladder} --stages=naive",
        "optimizers": f"{small} --train --max_steps=300 --warmup_steps=30 --vary {optimizers}",
    }
    return {name: text.split() for name, text in commands.items()}


def main(argv):
    parser = Parser(prog="lab/gpu.sh", description="Takes all measurements that need an NVIDIA GPU.")
    parser.add_argument("--minutes", type=positive, default=9.0, help="time for all parts (default: 9)")
    parser.add_argument("--out_dir", help="folder of the results (default: out/gpu/<hash of the measured code>)")
    parser.add_argument("--rehearse", action="store_true", help="run every part at tiny size on the CPU")
    for peer in CHECKOUTS:
        parser.add_argument(f"--{peer}", metavar="PATH", help="a checkout of it, to be measured among the peers")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    if not (options.rehearse or torch.cuda.is_available()):
        raise BadInput("no NVIDIA GPU here; expected one, or --rehearse, which runs every part at tiny size on the CPU")
    end_on_signals()
    folder = Path(options.out_dir or f"out/gpu/{'rehearsal-' if options.rehearse else ''}{code_hash()}")
    commands = parts(**{peer: getattr(options, peer) for peer in CHECKOUTS})
    if options.rehearse:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # tiny models need one thread
        commands = {name: rehearsal(words) for name, words in commands.items()}
    state = measure(commands, folder, options.minutes * 60)
    print("\n".join(f"{name}: {state.get(name, 'not started')}" for name in commands))
    wrong = faults(folder, state)
    print("\n".join(f"WRONG: {fault}" for fault in wrong) or "nothing is wrong")
    print(f"written: {folder}")
    if wrong:
        sys.exit(1)


def rehearsal(words):
    """A command at tiny size on the CPU."""
    tiny = TINY if words[0].endswith(".py") else []
    return [*words, *tiny, *(short for word in words for short in REHEARSED.get(word, ()))]


def measure(commands, folder, seconds):
    """Runs the unfinished parts, within `seconds` in total. Returns {part: its state as text}."""
    deadline = time.monotonic() + seconds

    def take(row):
        name = row["name"]
        print(f"{name} …", flush=True)
        state = run(commands[name], folder / name, min(deadline - time.monotonic() - GRACE, SHARE * seconds))
        print(f"{name}: {state}\n", flush=True)
        if state != DONE:
            raise Failed(state)
        return {}

    with Runs(folder / RUNS, "parts", {}) as runs:
        list(runs.take(lambda: [{"name": name} for name in commands], take, deadline - GRACE, unit="part"))
        return {part.row["name"]: part.failed or DONE for part in runs}


def run(words, folder, seconds):
    """Runs a part for at most `seconds`, and prints the end of its log. Returns its state as text.

    A part that refuses its input, or finds no package, is skipped: it lacks something here.
    """
    path = folder.with_suffix(".log")
    command = [sys.executable, *words, *([f"--out_dir={folder}"] if words[0].endswith(".py") else [])]
    # A part that is cut off must not take with it what it has printed
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    with open(path, "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = path.read_text().strip().splitlines() or [""]
    print("\n".join(lines[-SHOWN:]))
    if code is None:
        return "out of time; the same command continues"
    if code == BAD_INPUT or (code and MISSING in lines[-1]):
        return f"skipped: {lines[-1]}"
    return f"failed: exit code {code}; {lines[-1]}" if code else DONE


def end(process):
    """Ends a process and its children: first by SIGTERM, so that a training run can save, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def faults(folder, state):
    """Lists faults: failed parts, and lines of tables with losses unlike naive's or a failed row."""
    wrong = [f"{name}: {now}" for name, now in state.items() if now.startswith("failed")]
    for path in sorted(folder.glob("*/table.md")):
        lines = [line for line in path.read_text().splitlines() if FAULT.search(line) and MISSING not in line]
        wrong += [f"{path.parent.name}: {line}" for line in lines]
    return wrong


if __name__ == "__main__":
    run_script(main)
