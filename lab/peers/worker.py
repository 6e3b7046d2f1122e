"""Measures one peer, in a process of its own: python -m lab.peers.worker time|memory --peer=NAME config/x.py ...

Prints its figures as one line of JSON.

    time    seconds of a step, the losses of the first steps, peak resident memory, on a GPU peak bytes of all tensors
    memory  on a CPU, peak bytes of all tensors in two steps: counting them takes time
"""

import importlib
import json
import os
import tempfile
import warnings
from nanoladder.entry import Parser, run_script

import torch
from torch.profiler import ProfilerActivity, profile

from lab.anatomy import allocated
from lab.measure import WARMUP, WINDOW, end_if_out_of_memory
from lab.peers.task import Clock, Task
from nanoladder import machine
from nanoladder.run import load_config

PEERS = {"nanoladder": "ours", "transformers": "huggingface", "lightning": "lightning", "nanogpt": "nanogpt"}  # files


def main(argv):
    parser = Parser(prog="lab.peers.worker", allow_abbrev=False)
    parser.add_argument("measurement", choices=["time", "memory"])
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--best", action="store_true", help="its own best settings, instead of its defaults")
    parser.add_argument("--steps", type=int, default=4, help="least number of steps to time")
    parser.add_argument("--nanogpt", help="checkout of nanoGPT")
    options, words = parser.parse_known_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer takes all that there are
    warnings.filterwarnings("ignore")
    try:
        print(json.dumps(measure(options, words)))
    except Exception as error:
        end_if_out_of_memory(error)
        raise


def measure(options, words):
    """Lets a peer train, and returns the figures of the measurement."""
    config = load_config(words)
    constant = [f"--min_lr={config.learning_rate}", "--warmup_steps=0", "--lr_decay_steps=0", "--max_steps=1000000"]
    config, naive = (load_config([*words, *constant, *stage]) for stage in ([], ["--stage=naive"]))
    device = machine.choose_device(config.device)
    timed, on_gpu = options.measurement == "time", device.type == "cuda"
    clock = Clock(device, WARMUP, options.steps, WINDOW) if timed else Clock(device, 1, 1, 0)
    train = importlib.import_module(f"lab.peers.{PEERS[options.peer]}").train
    arguments = [options.nanogpt] if options.peer == "nanogpt" else []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        task = Task(config, naive, clock, options.best, folder)
        if not timed:
            return {"peak": peak(lambda: train(task, *arguments))}
        setting, dtype = train(task, *arguments)
    return {
        "seconds": clock.seconds,
        "first_step_seconds": clock.first,
        "peak": torch.cuda.max_memory_allocated(device) if on_gpu else None,  # since the first step
        "resident_bytes": None if on_gpu else clock.resident(),
        "tokens": config.batch_size * config.context_length,
        "losses": [float(loss) for loss in clock.losses[: WARMUP + options.steps]],
        "threads": torch.get_num_threads(),
        "setting": setting,
        "dtype": dtype,
    }


def peak(run):
    """Peak bytes of all tensors on the CPU while something runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return max(now for _, now in allocated(profiler, on_gpu=False))


if __name__ == "__main__":
    run_script(main)
