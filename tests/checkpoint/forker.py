"""Forks children that train, and kills them, for tests/checkpoint/test_crashes.py; torch is imported only once.

argv[1] is a JSON file: argv (of train.py), kills (a number), seed, log (file for the children's output). Each of the
first `kills` children dies at a random delay after entering a random phase for the n-th time, n random too; the last
child finishes the run. Replaces the file by a list of the phases in which the kills hit.

A child sets its own alarm, so that on a busy machine, too, it gets no further than meant. SIGALRM, which nobody
handles, ends a process as SIGKILL does. It writes its phase to shared memory; the writing thread's phase takes
precedence over the training thread's: step (in train_step), write (of a checkpoint's file), rename (of that file,
prolonged by 2 ms before and after).
"""

import itertools
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
TRAINING, WRITING = 0, 1  # places in the shared memory


def during(phase, function, shared, due, stretch=0.0):
    """The function, that its phase may be seen; files that the main thread writes, such as metrics, are no phase.

    due: the phase, the number of its calls and the seconds after which the process ends.
    """
    calls = itertools.count(1)

    def call(*args, **kwargs):
        main = threading.current_thread() is threading.main_thread()
        if main and phase != STEP:
            return function(*args, **kwargs)
        place = TRAINING if main else WRITING
        before, shared[place] = shared[place], phase
        if due[:2] == (phase, next(calls)):
            signal.setitimer(signal.ITIMER_REAL, due[2])
        time.sleep(stretch)
        try:
            return function(*args, **kwargs)
        finally:
            time.sleep(stretch)
            shared[place] = before

    return call


def child(argv, shared, log, due):
    """Trains in a fork of this process, which it ends."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        metrics.plot = lambda *_: None
        train.train_step = during(STEP, train.train_step, shared, due)
        checkpoint.save.write_file = during(WRITE, checkpoint.save.write_file, shared, due)
        files.os.replace = during(RENAME, os.replace, shared, due, 0.002)
        train.train(load_config(argv))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(path):
    job = json.loads(path.read_text())
    rng = random.Random(job["seed"])
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # the first step imports much
    found = []
    while True:
        shared = mmap.mmap(-1, mmap.PAGESIZE)
        last = len(found) == job["kills"]
        due = (None if last else rng.choice([STEP, WRITE, RENAME]), rng.randint(1, 3), 1e-6 + rng.random() * 0.004)
        if (pid := os.fork()) == 0:
            child(job["argv"], shared, job["log"], due)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (0 if last else -signal.SIGALRM), (code, len(found), Path(job["log"]).read_text()[-3000:])
        if last:
            break
        found.append(NAMES[shared[WRITING] or shared[TRAINING]])
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
