"""Forks children that train, and kills them, for tests/checkpoint/test_crashes.py; torch is imported only once.

argv[1] is a JSON file: argv (of train.py), kills (a number), seed, log (file for the children's output). Each of the
first `kills` children dies by SIGKILL, at a random delay after entering a random phase for the n-th time, n random too;
the last child finishes the run. Replaces the file by a list of the phases in which the kills hit.

Each child writes its phase to shared memory; the writing thread's phase takes precedence over the training thread's:
step (in train_step), write (of a checkpoint's file), rename (of that file, prolonged by 2 ms before and after).
"""

import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

import train
from nanoladder import checkpoint, files
from nanoladder.config import load_config
from nanoladder.run import metrics

OTHER, STEP, WRITE, RENAME = range(4)
NAMES = ["other", "step", "write", "rename"]
TRAINING, WRITING, COUNTS = 0, 1, 2  # places in the shared memory: two phases, and how often each was entered


def during(phase, function, shared, stretch=0.0):
    """The function, that its phase may be seen; files that the main thread writes, such as metrics, are no phase."""

    def call(*args, **kwargs):
        main = threading.current_thread() is threading.main_thread()
        if main and phase != STEP:
            return function(*args, **kwargs)
        place = TRAINING if main else WRITING
        before, shared[place] = shared[place], phase
        shared[COUNTS + phase] = min(255, shared[COUNTS + phase] + 1)
        time.sleep(stretch)
        try:
            return function(*args, **kwargs)
        finally:
            time.sleep(stretch)
            shared[place] = before

    return call


def child(argv, shared, log):
    """Trains in a fork of this process, which it ends."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        metrics.plot = lambda *_: None
        train.train_step = during(STEP, train.train_step, shared)
        checkpoint.save.write_file = during(WRITE, checkpoint.save.write_file, shared)
        files.os.replace = during(RENAME, os.replace, shared, 0.002)
        train.train(load_config(argv))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_for(pid, shared, phase, times, until):
    """Waits until the child has been in the phase so often, or has ended. Returns its exit status, None if it lives."""
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if phase is not None and shared[COUNTS + phase] >= times:
            return None
        time.sleep(0.0002)
    raise TimeoutError


def main(path):
    job = json.loads(path.read_text())
    rng = random.Random(job["seed"])
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # the first step imports much
    found = []
    while True:
        shared = mmap.mmap(-1, mmap.PAGESIZE)
        pid = os.fork()
        if pid == 0:
            child(job["argv"], shared, job["log"])
        last = len(found) == job["kills"]
        phase = None if last else rng.choice([STEP, WRITE, RENAME])
        status = wait_for(pid, shared, phase, rng.randint(1, 3), time.monotonic() + 60)
        if status is not None:  # it has come to its end
            assert status == 0 and last, (status, len(found), Path(job["log"]).read_text()[-3000:])
            break
        time.sleep(rng.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found.append(NAMES[shared[WRITING] or shared[TRAINING]])
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
