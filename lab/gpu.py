"""Measures, part by part, all that a machine with an NVIDIA GPU must show: bash lab/gpu.sh [--minutes=9] [--prepare]

Each part is a command of its own, with its own share of the minutes, its own log, and results that it writes as it
goes; the same command later continues it. A part that lacks a package or a dataset is skipped. At the end of each part
state.json, summary.txt and results.tar.gz are written anew. The exit code is 1 if something is wrong, which neither a
skipped part nor one that ran out of time is.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch

from lab import report
from lab.plan import positive
from lab.results import ROOT, code_hash
from nanoladder import files
from nanoladder.errors import BadInput

GPT2_TOKENS, BYTES = "python_stdlib_bpe50257", "python_stdlib_byte"
DATASETS = {  # name: the command that prepares it
    BYTES: ["data/python_stdlib/prepare.py", "--tokenizer=byte"],
    GPT2_TOKENS: ["data/python_stdlib/prepare.py", "--tokenizer=bpe:50257"],
    "python_stdlib": ["data/python_stdlib/prepare.py"],
    "shakespeare_char": ["data/shakespeare_char/prepare.py"],
}
SPEED_STAGES = "naive,tf32,amp,flash,fused_adamw,pad_vocab,compile,chunked_loss"
BAD_INPUT = 2  # exit code of nanoladder.entry
ALL_DESELECTED = 5  # pytest's exit code if the tests that are left are none
GRACE = 10  # seconds that a part has to end
TUNING = 0.45  # share of the minutes that the search for the fastest config takes; it keeps to its time by itself
ROUNDS = ["--repeats=2"]  # of a ladder and of the peers: a GPU's times differ little, and its minutes are few
EAGER = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=32", "--batch_size=4"]
EAGER += ["--micro_batch_size=0", "--compile=False"]
ONCE = [*EAGER, "--repeats=1", "--steps=1"]
REHEARSED = {  # {program or mode: options that make a rehearsal short}; of an option given twice, the last counts
    "pytest": [],
    "train.py": [*EAGER, "--max_steps=20", "--eval_windows=8"],
    "ladder": [*ONCE, "--stages=naive,flash"],
    "vary": [*ONCE, "--vary", "attention=matmul,sdpa"],
    "optimizers": [*EAGER, "--train_steps=6", "--grid=1"],
    "tune": [*EAGER, "--minutes=1.5"],
    "peers": ONCE,
}


@dataclass(frozen=True)
class Part:
    """A command: name, program and its arguments, share of the minutes that it may take, dataset and mode."""

    name: str
    program: str
    words: tuple
    share: float
    dataset: str = ""
    mode: str = ""  # of profile.py

    def command(self, folder, rehearse):
        words = list(self.words)
        if self.dataset:
            words += [f"--dataset={self.dataset}", f"--out_dir={folder / self.name}"]
        if self.mode:
            words += [f"--mode={self.mode}"]
        if self.mode in ("tune", "peers"):
            words += [f"--tuned_dir={folder / 'tuned'}"]
        log = folder / f"{self.name}.log"
        if self.program == "pytest" and log.exists():
            passed = re.findall(r"^(tests/.*?) PASSED", log.read_text(), re.MULTILINE)
            words += [f"--deselect={test}" for test in passed]
        if rehearse:
            words += REHEARSED[self.mode or self.program]
        return [sys.executable, *([] if self.program.endswith(".py") else ["-m"]), self.program, *words]


def parts(minutes=9.0, nanogpt=None):
    """The parts in order of value, for so many minutes. nanogpt: path of a checkout, which is a peer too."""
    tests = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    tests = [path for path in tests if "needs_gpu" in (ROOT / path).read_text()]

    def profile(name, share, mode, dataset, *words):
        return Part(name, "profile.py", words, share, dataset, mode)

    reference, gpt2, shakespeare = "config/reference.py", "config/gpt2.py", "config/shakespeare_char.py"
    few, speed = "--stages=naive,compile,chunked_loss", f"--stages={SPEED_STAGES}"
    batch_32, batch_64 = ([f"--batch_size={n}", f"--micro_batch_size={n}"] for n in (32, 64))
    small = ("config/quickstart.py", "--n_embd=192", "--n_head=4", "--learning_rate=2e-3")
    kernels = ("--vary", "attention=matmul,flash,cudnn,efficient")
    beside = [f"--nanogpt={nanogpt}"] if nanogpt else []
    return [
        Part("tests", "pytest", ("-vv", "-m", "gpu", *tests), 0.3),
        profile("reference-50257", 0.45, "ladder", GPT2_TOKENS, reference, *ROUNDS),
        profile("reference-256", 0.15, "ladder", BYTES, reference, few, *ROUNDS),
        profile("gpt2", 0.35, "ladder", GPT2_TOKENS, gpt2, *batch_32, speed, *ROUNDS),
        profile("tune", TUNING + 0.05, "tune", BYTES, reference, f"--minutes={TUNING * minutes:g}"),
        profile("peers", 0.4, "peers", BYTES, reference, *beside, *ROUNDS),
        profile("attention", 0.15, "vary", GPT2_TOKENS, reference, *kernels, *ROUNDS),
        profile("gpt2-batch-64", 0.15, "vary", GPT2_TOKENS, gpt2, *batch_64, "--vary", "micro_batch_size=32", *ROUNDS),
        profile("loss-chunks", 0.15, "vary", GPT2_TOKENS, reference, "--vary", "loss_chunks=0,2,8,32", *ROUNDS),
        Part("train-shakespeare", "train.py", (shakespeare, "--init_from=auto"), 0.25, "shakespeare_char"),
        Part("train-reference", "train.py", (reference, "--init_from=auto"), 0.2, BYTES),
        profile("gpt2-low-memory", 0.2, "ladder", GPT2_TOKENS, "config/gpt2_low_memory.py", "--stages=naive", *ROUNDS),
        profile("optimizers", 0.45, "optimizers", "python_stdlib", *small),
    ]


def main(argv):
    parser = Parser(prog="lab/gpu.sh", description="Measures what a machine with an NVIDIA GPU must show.")
    parser.add_argument("--minutes", type=positive, default=9.0, help="time for all parts (default: 9)")
    parser.add_argument("--out_dir", help="folder of the results (default: out/gpu/<hash of the measured code>)")
    parser.add_argument("--rehearse", action="store_true", help="run every part at tiny size on the CPU")
    parser.add_argument("--prepare", action="store_true", help="write the datasets, and measure nothing")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to be measured among the peers")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    if options.prepare:
        return prepare()
    if not (options.rehearse or torch.cuda.is_available()):
        raise BadInput("no NVIDIA GPU here; expected one, or --rehearse, which runs every part at tiny size on the CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part that runs, too
    name = f"rehearsal-{code_hash()}" if options.rehearse else code_hash()
    folder = Path(options.out_dir or f"out/gpu/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    lines, wrong = measure(parts(options.minutes, options.nanogpt), folder, options.minutes * 60, options.rehearse)
    print("\n".join(["", *lines, f"written: {folder}/summary.txt and results.tar.gz"]))
    if wrong:
        sys.exit(1)


def measure(parts, folder, seconds, rehearse):
    """Runs the parts that are not done, for so many seconds in all. Returns the summary's lines and what is wrong."""
    path = folder / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    deadline = time.monotonic() + seconds
    for part in parts:
        before = state.setdefault(part.name, {"status": "out of time", "seconds": 0})
        left = deadline - time.monotonic() - GRACE
        if before["status"] == "done" or left < 0:
            continue
        print(f"{part.name} …", flush=True)
        state[part.name] = run(part, folder, min(left, part.share * seconds), rehearse, before["seconds"])
        print(f"{part.name}: {report.status(state[part.name])}", flush=True)
        files.write(path, json.dumps(state, indent=1) + "\n")
        lines, _ = report.summary(parts, folder, state)
        files.write(folder / "summary.txt", "\n".join(lines) + "\n")
        pack(folder)
    return report.summary(parts, folder, state)


def run(part, folder, seconds, rehearse, before):
    """Runs a part for so many seconds at most. Returns its state; `before`: seconds that it took in earlier runs.

    A part that refuses its input, or finds no package, is skipped: it lacks something here.
    """
    start, path = time.monotonic(), folder / f"{part.name}.log"
    # A part that is cut off must not take with it what it has printed; tiny models need one thread.
    environment = {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if rehearse else {})
    with open(path, "a") as log:
        command, options = part.command(folder, rehearse), {"stdout": log, "stderr": log, "process_group": 0}
        process = subprocess.Popen(command, env=os.environ | environment, **options)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    done = code == 0 or (part.program == "pytest" and code == ALL_DESELECTED)
    state = {"status": "done" if done else "out of time" if code is None else "failed"}
    if state["status"] == "failed":
        reason = path.read_text().strip().rpartition("\n")[2]
        state["reason"] = f"exit code {code}; {reason}"
        if code == BAD_INPUT or "No module named" in reason:
            state = {"status": "skipped", "reason": reason}
    return state | {"seconds": round(before + time.monotonic() - start)}


def end(process):
    """Ends a process and all that it started: first politely, so that a training run saves, then at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def pack(folder):
    """Packs all results but checkpoints into results.tar.gz."""
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".safetensors", ".gz")]
    with tarfile.open(folder / "results.tar.gz", "w:gz") as tar:
        for path in kept:
            tar.add(path, path.relative_to(folder))


def prepare():
    """Writes the datasets that are not there yet. One that cannot be written is named; its parts will be skipped."""
    for name, command in DATASETS.items():
        done = (ROOT / "data" / name / "meta.json").exists()
        if not done and subprocess.run([sys.executable, *command]).returncode:
            print(f"not prepared: data/{name}")


if __name__ == "__main__":
    run_script(main)
