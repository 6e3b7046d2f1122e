"""Turns a forked process into a program. Imports only what lab/measure/launch.py has loaded before the fork."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import torch


def become(words, folder, environment, streams):
    """Turns this process into `python *words`."""
    for descriptor, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDWR), descriptor)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    fork_children()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))
    option, *sys.argv = words if words[0] in ("-c", "-m") else ["", *words]
    sys.path.insert(0, str(folder) if option else str(Path(words[0]).resolve().parent))
    if option == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(code, {"__name__": "__main__"})
    elif option == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def fork_children():
    """Makes this process start children, such as a DataLoader's workers, by fork, not by its own fork server."""
    multiprocessing.set_start_method("fork", force=True)


def run_script(*argv):
    fork_children()
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
