"""Script of processes.work: trains several jobs in the same processes.

argv[0] is a JSON file, {name: job}. A job has argv (of train.py) and optionally
- program: script to run instead of train.py
- copy: [from, to], copied before the job begins; without: patterns of files to leave out
- rank_1: argv or cwd of the second process only
- fault: [rank, step, kind], where kind is raise, overflow (of a gradient), sleep, exit or a signal, with a second one
  ("SIGSTOP, SIGTERM") for the other processes a second later; in the first attempt only
- grace: seconds of silence that end a run after a signal; heartbeats are an eighth of it apart
- slow: [rank, milliseconds that a product takes there]

Compiled programs are traced, differentiated and partitioned as usual, but run without generated code (aot_eager), which
takes a tenth of the time. Each process writes its results beside the file, as rank0.json and so on:
{job: {"error", "reductions", "threads"}}.
"""

import functools
import json
import math
import os
import runpy
import shutil
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import in_memory, same, whole
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train
from nanoladder import checkpoint, parallel
from nanoladder.entry import run_script
from nanoladder.errors import BadInput
from nanoladder.parallel import heartbeat
from nanoladder.run import load_config, metrics, run

reductions = 0


def counted(function):
    """Wraps a function to count its calls as reductions of gradients."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        global reductions
        reductions += 1
        return function(*args, **kwargs)

    return call


class CountedDataParallel(parallel.DistributedDataParallel):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.register_comm_hook(dist.group.WORLD, counted(allreduce_hook))


def faulty(rank, at_step, kind, forward_backward=train.forward_backward):
    """Wraps train.forward_backward to cause a fault at a rank and step."""
    steps = 0

    def call(model, *args):
        nonlocal steps
        steps += 1
        loss = forward_backward(model, *args)
        if steps == at_step and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if parallel.rank() == rank:
                fail(model, kind.partition(", ")[0])
            elif ", " in kind:
                threading.Timer(1, os.kill, [os.getpid(), getattr(signal, kind.partition(", ")[2])]).start()
        return loss

    return call


def fail(model, kind):
    """Causes a fault of this process."""
    if kind == "raise":
        raise RuntimeError("injected")
    if kind in ("exit", "SIGSTOP"):
        time.sleep(2)  # a few heartbeats, so that they say where it is
    if kind == "overflow":
        next(model.parameters()).grad.fill_(math.inf)
    elif kind == "sleep":
        time.sleep(300)
    elif kind == "exit":
        os._exit(0)
    else:
        os.kill(os.getpid(), getattr(signal, kind))


def resume_exactly(model, optimizer, scaler, state, path, resume=checkpoint.resume):
    """Resumes, and asserts that a new checkpoint would equal the old one, whatever layout wrote that."""
    resume(model, optimizer, scaler, state, path)
    again = whole(*checkpoint.snapshot(model.config, {}, model, optimizer, scaler, state["progress"]))
    if parallel.rank() == 0:
        assert all(same(again[part], in_memory(state[part])) for part in ("model", "optimizer")), path


def main(argv):
    global reductions
    path, seen = Path(argv[0]), {}
    jobs = json.loads(path.read_text())
    stop, parallel.destroy_process_group = parallel.destroy_process_group, dist.barrier  # one group for all jobs
    parallel.DistributedDataParallel = CountedDataParallel
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # before 2.13
    setattr(dist, name, counted(getattr(dist, name)))
    checkpoint.resume = resume_exactly
    metrics.plot = lambda *_: None
    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    home = os.getcwd()
    for name, job in jobs.items():
        special = job.get("rank_1", {}) if os.environ["RANK"] == "1" else {}
        if "copy" in job:
            if parallel.rank() == 0:
                shutil.copytree(*job["copy"], ignore=shutil.ignore_patterns(*job.get("without", [])))
            dist.barrier()  # the other looks for its config
        if "grace" in job:
            heartbeat.GRACE, heartbeat.PERIOD = job["grace"], job["grace"] / 8
        if "slow" in job and int(os.environ["RANK"]) == job["slow"][0]:
            run.time_product = lambda *_, slow=job["slow"][1]: slow
        if "fault" in job:
            train.forward_backward = faulty(*job["fault"])
        if "--shard=hybrid" in job["argv"]:
            os.environ["LOCAL_WORLD_SIZE"] = "2"  # four processes pass for two nodes
        os.chdir(special.get("cwd", job.get("cwd", home)))
        torch._dynamo.reset()
        reductions, error = 0, None
        try:
            program = runpy.run_path(job["program"])["train"] if "program" in job else train.train
            program(load_config(job["argv"] + special.get("argv", [])))
        except BadInput as refused:
            if len(jobs) == 1:
                raise
            error = str(refused)
        seen[name] = {"error": error, "reductions": reductions, "threads": torch.get_num_threads()}
        os.chdir(home)
    path.with_name(f"rank{parallel.rank()}.json").write_text(json.dumps(seen))
    parallel.destroy_process_group = stop
    parallel.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
