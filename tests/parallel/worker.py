"""Script of processes.work: trains several jobs in the same processes.

argv[1] is a JSON file, a list of jobs. A job has argv (of train.py) and optionally
- program: script to run instead of train.py
- copy: [from, to], copied before the job begins
- backend: of the compiler, inductor in place of aot_eager, which takes a tenth of its time and makes the same cuts
- rank_1: argv or cwd of the second process only
- die: [rank, step, how], where how is raise or a signal; in the first attempt only
- pause: [step, path]; at this step of the first attempt, writes the process id to path<rank> and waits for path_over

Each process writes its results beside the file, as rank0.json and so on: {job: {"error", "reductions"}}.
"""

import functools
import json
import os
import runpy
import shutil
import signal
import time
from pathlib import Path
from nanoladder.entry import run_script

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train
from nanoladder import parallel
from nanoladder.errors import BadInput
from nanoladder.parallel import data_parallel
from nanoladder.run import load_config, metrics

reductions = 0


def counted(function):
    """The function, counting its calls as reductions of gradients."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        global reductions
        reductions += 1
        return function(*args, **kwargs)

    return call


class CountedDataParallel(data_parallel.DistributedDataParallel):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.register_comm_hook(dist.group.WORLD, counted(allreduce_hook))


def dying(rank, at_step, how, train_step=train.train_step):
    """train_step, but in this process and step it is the end."""
    steps = 0

    def step(*args):
        nonlocal steps
        steps += 1
        if parallel.rank() == rank and steps == at_step and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if how == "raise":
                raise RuntimeError("injected")
            os.kill(os.getpid(), getattr(signal, how))
        return train_step(*args)

    return step


def pausing(at_step, path, train_step=train.train_step):
    """train_step, but in the first attempt it waits before a step."""
    steps = 0

    def step(*args):
        nonlocal steps
        steps += 1
        if steps == at_step and not Path(f"{path}_over").exists():
            Path(f"{path}{parallel.rank()}").write_text(str(os.getpid()))
            while not Path(f"{path}_over").exists():
                time.sleep(0.1)
        return train_step(*args)

    return step


def main(argv):
    global reductions
    path = Path(argv[0])
    seen = {}
    stop, parallel.stop = parallel.stop, dist.barrier  # one group for all jobs
    data_parallel.DistributedDataParallel = CountedDataParallel
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # before 2.13
    setattr(dist, name, counted(getattr(dist, name)))
    metrics.plot = lambda *_: None
    home, compile_module = os.getcwd(), torch.nn.Module.compile
    for name, job in json.loads(path.read_text()).items():
        special = job.get("rank_1", {}) if os.environ["RANK"] == "1" else {}
        if "copy" in job and parallel.rank() == 0:
            shutil.copytree(*job["copy"])
        if "die" in job:
            train.train_step = dying(*job["die"])
        if "pause" in job:
            train.train_step = pausing(*job["pause"])
        os.chdir(special.get("cwd", job.get("cwd", home)))
        torch._dynamo.reset()
        backend = job.get("backend", "aot_eager")
        torch.nn.Module.compile = functools.partialmethod(compile_module, backend=backend)
        reductions, error = 0, None
        try:
            program = runpy.run_path(job["program"])["train"] if "program" in job else train.train
            program(load_config(job["argv"] + special.get("argv", [])))
        except BadInput as refused:
            if len(json.loads(path.read_text())) == 1:
                raise
            error = str(refused)
        seen[name] = {"error": error, "reductions": reductions, "threads": torch.get_num_threads()}
        os.chdir(home)
    path.with_name(f"rank{parallel.rank()}.json").write_text(json.dumps(seen))
    stop()


if __name__ == "__main__":
    run_script(main)
