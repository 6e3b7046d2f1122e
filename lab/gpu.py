"""Measures, part by part, all that a machine with an NVIDIA GPU must show: bash lab/gpu.sh [--minutes=9] [--prepare]

Each part is a command of its own, with its own share of the minutes, its own log, and results that it writes as it
goes; the same command later continues it. A part that lacks a package or a dataset is skipped. At the end of each part
state.json, summary.txt and results.tar.gz are written anew. The exit code is 1 if something is wrong, which neither a
skipped part nor one that ran out of time is.
"""

import importlib.util
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
from lab.peers import mode as peers
from lab.plan import positive
from lab.results import ROOT, code_hash
from nanoladder import files
from nanoladder.errors import BadInput

GPT2_TOKENS = "python_stdlib_bpe50257"
DATASETS = {  # name: the command that prepares it
    "python_stdlib_byte": ["data/python_stdlib/prepare.py", "--tokenizer=byte"],
    GPT2_TOKENS: ["data/python_stdlib/prepare.py", "--tokenizer=bpe:50257"],
    "python_stdlib": ["data/python_stdlib/prepare.py"],
    "shakespeare_char": ["data/shakespeare_char/prepare.py"],
}
SPEED_STAGES = "naive,tf32,amp,flash,fused_adamw,pad_vocab,compile,chunked_loss"
BAD_INPUT = 2  # exit code of nanoladder.entry
ALL_DESELECTED = 5  # pytest's exit code if the tests that are left are none
ROUNDS = 2  # of a ladder and of the peers: a GPU's times differ little, and its minutes are few
GRACE = 10  # seconds that a part has to end
TUNING = 0.45  # share of the minutes that the search for the fastest config takes; it keeps to its time by itself
TINY = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=32", "--batch_size=4"]
ON_A_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # models too small for more threads
EAGER = [*TINY, "--micro_batch_size=0", "--compile=False"]
REHEARSED = {  # {program or mode: options that make a rehearsal short}; of an option given twice, the last counts
    "pytest": [],
    "train.py": [*EAGER, "--max_steps=20", "--eval_windows=8"],
    "ladder": [*EAGER, "--repeats=1", "--steps=1", "--stages=naive,flash"],
    "vary": [*EAGER, "--repeats=1", "--steps=1", "--vary", "attention=matmul,sdpa"],
    "optimizers": [*EAGER, "--repeats=1", "--steps=1", "--train_steps=6", "--grid=1"],
    "tune": [*EAGER, "--minutes=1.5"],
    "peers": [*EAGER, "--repeats=1", "--steps=1"],
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
        words = [*self.words, *[f"--repeats={ROUNDS}"] * (self.mode in ("ladder", "vary", "peers"))]
        if self.dataset:
            words += [f"--dataset={self.dataset}", f"--out_dir={folder / self.name}"]
        if self.mode:
            words += [f"--mode={self.mode}"]
        if self.mode in ("tune", "peers"):
            words += [f"--tuned_dir={folder / 'tuned'}"]
        if self.program == "pytest":
            words += [f"--deselect={test}" for test in passed(folder / f"{self.name}.log")]
        if rehearse:
            words += REHEARSED[self.mode or self.program]
        return [sys.executable, *([] if self.program.endswith(".py") else ["-m"]), self.program, *words]

    def lacks(self):
        """The reason why the part cannot run here, or None."""
        if self.dataset and not (ROOT / "data" / self.dataset / "meta.json").exists():
            return f"data/{self.dataset} is not prepared: bash lab/gpu.sh --prepare"
        checkout = any(word.startswith("--nanogpt=") for word in self.words)
        if self.mode == "peers" and peers.none_is_here(peers.missing(checkout)):
            return f"no peer is here: {peers.INSTALL}"
        packages = ("pytest", "hypothesis") if self.program == "pytest" else ()
        missing = [name for name in packages if not importlib.util.find_spec(name)]
        return f"needs {' and '.join(missing)}" if missing else None


def parts(minutes=9.0, nanogpt=None):
    """The parts in order of value, for so many minutes. nanogpt: path of a checkout, which is a peer too."""
    tests = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "needs_gpu" in path.read_text()]
    reference = ("config/reference.py",)
    few = (*reference, "--stages=naive,compile,chunked_loss")
    gpt2 = ("config/gpt2.py", "--batch_size=32", "--micro_batch_size=32", f"--stages={SPEED_STAGES}")
    large = ("config/gpt2.py", "--batch_size=64", "--micro_batch_size=64", "--vary", "micro_batch_size=32")
    kernels = (*reference, "--vary", "attention=matmul,flash,cudnn,efficient")
    chunks = (*reference, "--vary", "loss_chunks=0,2,8,32")
    search = (*reference, f"--minutes={TUNING * minutes:g}")  # in all calls together
    beside = (*reference, *([f"--nanogpt={nanogpt}"] if nanogpt else []))
    low = ("config/gpt2_low_memory.py", "--stages=naive")
    shakespeare, resumed = ("config/shakespeare_char.py", "--init_from=auto"), (*reference, "--init_from=auto")
    return [
        Part("tests", "pytest", ("-vv", "-m", "gpu", *(str(path.relative_to(ROOT)) for path in tests)), 0.3),
        Part("reference-50257", "profile.py", reference, 0.45, GPT2_TOKENS, "ladder"),
        Part("reference-256", "profile.py", few, 0.15, "python_stdlib_byte", "ladder"),
        Part("gpt2", "profile.py", gpt2, 0.35, GPT2_TOKENS, "ladder"),
        Part("tune", "profile.py", search, TUNING + 0.05, "python_stdlib_byte", "tune"),
        Part("peers", "profile.py", beside, 0.4, "python_stdlib_byte", "peers"),
        Part("attention", "profile.py", kernels, 0.15, GPT2_TOKENS, "vary"),
        Part("gpt2-batch-64", "profile.py", large, 0.15, GPT2_TOKENS, "vary"),
        Part("loss-chunks", "profile.py", chunks, 0.15, GPT2_TOKENS, "vary"),
        Part("train-shakespeare", "train.py", shakespeare, 0.25, "shakespeare_char"),
        Part("train-reference", "train.py", resumed, 0.2, "python_stdlib_byte"),
        Part("gpt2-low-memory", "profile.py", low, 0.2, GPT2_TOKENS, "ladder"),
        Part(
            "optimizers",
            "profile.py",
            ("config/quickstart.py", "--n_embd=192", "--n_head=4", "--learning_rate=2e-3"),
            0.45,
            "python_stdlib",
            "optimizers",
        ),
    ]


def passed(log):
    """The tests that passed in earlier runs, by pytest's verbose output."""
    text = log.read_text() if log.exists() else ""
    return re.findall(r"^(tests/.*?) PASSED", text, re.MULTILINE)


def main(argv):
    parser = Parser(prog="lab/gpu.sh", description="Measures what a machine with an NVIDIA GPU must show.")
    parser.add_argument("--minutes", type=positive, default=9.0, help="time for all parts (default: 9)")
    parser.add_argument("--out_dir", help="folder of the results (default: out/gpu/<hash of the measured code>)")
    parser.add_argument("--rehearse", action="store_true", help="run every part at tiny size on the CPU")
    parser.add_argument("--prepare", action="store_true", help="write the datasets, and measure nothing")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to be measured among the peers")
    parser.add_argument("--shakespeare", metavar="FILE", help="with --prepare: a copy of the text, not to download it")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    if options.prepare:
        prepare(options.shakespeare)
        return
    if not (options.rehearse or torch.cuda.is_available()):
        raise BadInput("no NVIDIA GPU here; expected one, or --rehearse, which runs every part at tiny size on the CPU")
    if options.nanogpt:
        peers.require_checkout(options.nanogpt)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part that runs, too
    folder = Path(options.out_dir or f"out/gpu/{'rehearsal-' * options.rehearse}{code_hash()}")
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
    lines, wrong = report.summary(parts, folder, state)
    for part in parts:
        before = state.get(part.name, {"seconds": 0})
        if before.get("status") == "done":
            continue
        left = deadline - time.monotonic()
        if reason := part.lacks():
            state[part.name] = before | {"status": "skipped", "reason": reason}
        elif left > GRACE:
            print(f"{part.name} …", flush=True)
            state[part.name] = run(part, folder, min(left - GRACE, part.share * seconds), rehearse, before["seconds"])
        else:
            state.setdefault(part.name, before | {"status": "out of time"})
        print(f"{part.name}: {report.status(state[part.name])}", flush=True)
        files.write(path, json.dumps(state, indent=1) + "\n")
        lines, wrong = report.summary(parts, folder, state)
        files.write(folder / "summary.txt", "\n".join(lines) + "\n")
        pack(folder)
    return lines, wrong


def run(part, folder, seconds, rehearse, before):
    """Runs a part for so many seconds at most. Returns its state; `before`: seconds that it took in earlier runs."""
    start, path = time.monotonic(), folder / f"{part.name}.log"
    command = part.command(folder, rehearse)
    # A part that is cut off must not take with it what it has printed.
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (ON_A_CPU if rehearse else {})
    with open(path, "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    if part.program == "pytest" and code == ALL_DESELECTED:
        code = 0
    state = {"status": {0: "done", None: "out of time"}.get(code, "failed")}
    if state["status"] == "failed":
        line = path.read_text().strip().rpartition("\n")[2]
        short = code == BAD_INPUT and "minutes=" in line  # of --mode=tune; another call may have more
        state |= {"status": "skipped", "reason": line} if short else {"reason": f"exit code {code}; {line}"}
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
    target = folder / "results.tar.gz"
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".safetensors", ".gz")]

    def write(file):
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for path in kept:
                tar.add(path, path.relative_to(folder))

    files.write(target, write)


def prepare(shakespeare):
    """Writes the datasets that are not there yet. One that cannot be written is named; its parts will be skipped."""
    for name, command in DATASETS.items():
        if not (ROOT / "data" / name / "meta.json").exists():
            text = [f"--input={shakespeare}"] if shakespeare and name == "shakespeare_char" else []
            if subprocess.run([sys.executable, *command, *text]).returncode:
                print(f"not prepared: data/{name}")
    sizes = {name: sum(path.stat().st_size for path in (ROOT / "data" / name).glob("*.*")) for name in DATASETS}
    print(f"{', '.join(f'data/{name}' for name in sizes)}: {sum(sizes.values()) / 1e6:.1f} MB in all")


if __name__ == "__main__":
    run_script(main)
