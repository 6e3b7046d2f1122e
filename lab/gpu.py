"""Measures, part by part, all that a machine with an NVIDIA GPU must show: bash lab/gpu.sh [--minutes=9] [--prepare]

Each part is a command of its own, with its own share of the minutes, its own log, and results that it writes as it
goes; the same command later continues it. A part that lacks a package or a dataset is skipped. At the end of each part
state.json and summary.txt are written anew. The exit code is 1 if something is wrong, which neither a skipped part nor
one that ran out of time is.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch

from lab import tables
from lab.plan import positive
from lab.results import ROOT, code_hash, read_results
from lab.summary import summarize
from nanoladder import files
from nanoladder.errors import BadInput

GPT2_TOKENS, BYTES = "python_stdlib_bpe50257", "python_stdlib_byte"
DATASETS = {  # name: the command that prepares it
    BYTES: ["data/python_stdlib/prepare.py", "--tokenizer=byte"],
    GPT2_TOKENS: ["data/python_stdlib/prepare.py", "--tokenizer=bpe:50257"],
    "python_stdlib": ["data/python_stdlib/prepare.py"],
    "shakespeare_char": ["data/shakespeare_char/prepare.py"],
}
BAD_INPUT = 2  # exit code of nanoladder.entry
GRACE = 10  # seconds that a part has to end
TUNING = 0.45  # share of the minutes that the search for the fastest config takes; it keeps to its time by itself
# Notes of rows that are no fault
LEGITIMATE = ("not applicable", "out of memory", "needs ", "No module", "no kernel")
TINY = ["--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=32", "--context_length=32", "--batch_size=4"]
TINY += ["--micro_batch_size=0", "--compile=False"]
REHEARSED = {  # a word of a command: what makes its rehearsal short; of an option given twice, the last counts
    "train.py": ["--max_steps=20", "--eval_windows=8"],
    "--repeats=2": ["--repeats=1", "--steps=1"],
    "--mode=ladder": ["--stages=naive,flash"],
    "--mode=tune": ["--minutes=1.5"],
    "--vary": ["--vary", "attention=matmul,sdpa"],
    "--train": ["--max_steps=6"],
}


@dataclass(frozen=True)
class Part:
    """A command: its name, the share of the minutes that it may take, and its words after `python`."""

    name: str
    share: float
    words: list

    def command(self, folder, rehearse):
        """The command line that writes to the folder. rehearse: at tiny size on the CPU."""
        words = list(self.words)
        if words[0].endswith(".py"):
            words.append(f"--out_dir={folder / self.name}")
        if rehearse:
            tiny = TINY if words[0].endswith(".py") else []
            words += [*tiny, *(short for word in self.words for short in REHEARSED.get(word, ()))]
        return [sys.executable, *words]


def parts(minutes=9.0, nanogpt=None):
    """The parts in order of value, for so many minutes. nanogpt: path of a checkout, which is a peer too."""
    reference, gpt2 = "profile.py config/reference.py", "profile.py config/gpt2.py"
    ladder, finished = "--mode=ladder --repeats=2", "--repeats=2 --vary"  # a GPU's times differ little
    bytewise, subwords = f"--dataset={BYTES}", f"--dataset={GPT2_TOKENS}"
    speed = "--stages=naive,tf32,amp,flash,fused_adamw,pad_vocab,compile,chunked_loss"
    small = "profile.py config/quickstart.py --dataset=python_stdlib --n_embd=192 --n_head=4"
    optimizers = "optimizer=adamw,adamw8bit,sgd,lion,muon,adafactor,galore learning_rate=6e-4,2e-3,6e-3"
    batch_64 = "--batch_size=64 --micro_batch_size=64"
    beside = f" --nanogpt={nanogpt}" if nanogpt else ""
    tests = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    tests = " ".join(path for path in tests if "needs_gpu" in (ROOT / path).read_text())  # others take time to import
    commands = {
        "tests": (0.3, f"-m pytest -v -m gpu {tests}"),
        "reference-50257": (0.45, f"{reference} {subwords} {ladder}"),
        "reference-256": (0.15, f"{reference} {bytewise} {ladder} --stages=naive,compile,chunked_loss"),
        "gpt2": (0.35, f"{gpt2} {subwords} {ladder} {speed} --batch_size=32 --micro_batch_size=32"),
        "tune": (TUNING + 0.05, f"{reference} {bytewise} --mode=tune --minutes={TUNING * minutes:g}"),
        "peers": (0.4, f"{reference} {bytewise} --mode=peers --repeats=2{beside}"),
        "attention": (0.15, f"{reference} {subwords} {finished} attention=matmul,flash,cudnn,efficient"),
        "gpt2-batch-64": (0.15, f"{gpt2} {subwords} {batch_64} {finished} micro_batch_size=32"),
        "loss-chunks": (0.15, f"{reference} {subwords} {finished} loss_chunks=0,2,8,32"),
        "train-shakespeare": (0.25, "train.py config/shakespeare_char.py --dataset=shakespeare_char --init_from=auto"),
        "train-reference": (0.2, f"train.py config/reference.py {bytewise} --init_from=auto"),
        "gpt2-low-memory": (0.2, f"profile.py config/gpt2_low_memory.py {subwords} {ladder} --stages=naive"),
        "optimizers": (0.45, f"{small} --train --max_steps=300 --warmup_steps=30 --vary {optimizers}"),
    }
    return [Part(name, share, text.split()) for name, (share, text) in commands.items()]


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
    print("\n".join(["", *lines, f"written: {folder}/summary.txt"]))
    if wrong:
        sys.exit(1)


def measure(parts, folder, seconds, rehearse):
    """Runs the parts that are not done, for so many seconds in all. Returns the summary's lines and what is wrong."""
    path = folder / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    deadline = time.monotonic() + seconds
    for part in parts:
        left = deadline - time.monotonic() - GRACE
        if state.get(part.name) == "done" or left < 0:
            continue
        print(f"{part.name} …", flush=True)
        state[part.name] = run(part, folder, min(left, part.share * seconds), rehearse)
        print(f"{part.name}: {state[part.name]}", flush=True)
        files.write(path, json.dumps(state, indent=1) + "\n")
        files.write(folder / "summary.txt", "\n".join(summary(parts, folder, state)[0]) + "\n")
    return summary(parts, folder, state)


def run(part, folder, seconds, rehearse):
    """Runs a part for so many seconds at most. Returns its state in words.

    A part that refuses its input, or finds no package, is skipped: it lacks something here.
    """
    path = folder / f"{part.name}.log"
    # A part that is cut off must not take with it what it has printed; tiny models need one thread.
    environment = {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if rehearse else {})
    with open(path, "w") as log:
        command, options = part.command(folder, rehearse), {"stdout": log, "stderr": log, "process_group": 0}
        process = subprocess.Popen(command, env=os.environ | environment, **options)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "out of time; the same command continues"
        finally:
            end(process)
    reason = path.read_text().strip().rpartition("\n")[2]
    if code == BAD_INPUT or (code and "No module named" in reason):
        return f"skipped: {reason}"
    return f"failed: exit code {code}; {reason}" if code else "done"


def end(process):
    """Ends a process and all that it started: first politely, so that a training run saves, then at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def summary(parts, folder, state):
    """The lines of all parts, and those that say what is wrong: {part: its state} of those that had their turn."""
    lines, wrong = [], []
    for part in parts:
        now = state.get(part.name, "not started")
        said, faults = found(folder, part.name) if not now.startswith("skipped") else ([], [])
        lines += [f"{part.name}: {now}", *(f"  {line}" for line in said if line)]
        wrong += [f"{part.name}, {fault}" for fault in faults] + [f"{part.name}: {now}"] * now.startswith("failed")
    return [*lines, *(f"WRONG: {fault}" for fault in wrong), *([] if wrong else ["nothing is wrong"])], wrong


def found(folder, name):
    """The lines that a part's results are worth so far, or the end of its log, and the faults among them.

    Faults are rows whose losses are another model's, and those that failed, other than for a reason of the machine's.
    """
    try:
        results = read_results(folder / name / "results.json")
    except BadInput:  # no results, or not yet
        log = folder / f"{name}.log"
        return (log.read_text().strip().splitlines()[-12:] if log.exists() else []), []
    on, lines, faults = results["machine"], [], []
    for mode, part in results["modes"].items():
        rates = [tables.machine_limits(part["limits"], on["native_bfloat16"])] if part["limits"] else []
        lines += [f"{tables.machine_in_words(results['machine'])}; torch {on['torch']}, CUDA {on.get('cuda')}", *rates]
        lines += tables.brief(results, mode).splitlines()
        for row in summarize(results, mode):
            if tables.is_wrong(row):
                faults.append(f"{row['name']}: {tables.losses(row)}")
            if row["note"] and not any(reason in row["note"] for reason in LEGITIMATE):
                faults.append(f"{row['name']}: {row['note']}")
    return lines, faults


def prepare():
    """Writes the datasets that are not there yet. One that cannot be written is named; its parts will be skipped."""
    for name, command in DATASETS.items():
        done = (ROOT / "data" / name / "meta.json").exists()
        if not done and subprocess.run([sys.executable, *command]).returncode:
            print(f"not prepared: data/{name}")


if __name__ == "__main__":
    run_script(main)
