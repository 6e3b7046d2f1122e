"""Traces the steps of several configs at a time, each in another process; predict.py then finds the traces.

Nearly all of a prediction is the compiler's work, on one core. Such a process is `python -m lab.ahead`: it reads
requests from stdin and answers each with its traces, both pickled, until stdin ends.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
from tqdm import tqdm

from lab import predict
from lab.trace import traced
from nanoladder import machine
from nanoladder.config import Config
from nanoladder.data.encode import n_cores
from nanoladder.errors import BadInput
from nanoladder.run.memory import child_environment

COMMAND = [sys.executable, "-m", "lab.ahead"]
PROCESS_BYTES = 1e9  # of memory: a process that traces GPT-2's blocks, compiled, takes 0.6 GB


def trace_rows(rows, device, device_type="cpu", world_size=1, memory_gb=0.0):
    """Takes all traces that predictions of the rows (name, config) need, and shows the progress.

    Rows that share a trace make a group. This process takes the groups from the first on. If several are compiled,
    others, as many as there are cores and memory for, take them from the last on. If one dies, its group is left.
    """
    conditions, groups = (device, device_type, world_size, memory_gb), {}
    for _, row in rows:
        if isinstance(row, Config):
            groups.setdefault(shared_traces(row, device_type, world_size), []).append(row)
    n_compiled = sum(config.compile for config, *_ in groups.values())
    n = min(n_cores(), int(machine.free_memory(torch.device("cpu")) // PROCESS_BYTES), n_compiled) - 1
    left = deque(groups.values())
    with tqdm(total=sum(map(len, left)), unit="stage", leave=False, disable=None) as bar:

        def trace_here():
            with contextlib.suppress(IndexError):
                while group := left.popleft():
                    trace_configs(group, *conditions)
                    bar.update(len(group))

        def trace_in(process):
            with contextlib.suppress(IndexError):
                while group := left.pop():
                    try:
                        traced.update(ask(process, group, *conditions))
                        bar.update(len(group))
                    except (EOFError, OSError, pickle.UnpicklingError):
                        return left.append(group)

        with ThreadPoolExecutor(max(n, 1)) as threads, processes(n) as others, every_second(bar.refresh):
            waiting = [threads.submit(trace_in, process) for process in others]
            trace_here()
            for future in waiting:
                future.result()
            trace_here()  # what a process that died has left


def ask(process, *request):
    """The process's answer. Raises EOFError, OSError or UnpicklingError if it dies."""
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


@contextlib.contextmanager
def every_second(function):
    """Calls a function once a second in a thread: a progress bar's clock goes on."""
    end = threading.Event()

    def tick():
        while not end.wait(1):
            function()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def shared_traces(config, device_type, world_size):
    """A key that configs have in common whose memory is from the same traces."""
    with contextlib.suppress(BadInput):
        return tuple(predict.needed_traces(config, device_type, world_size)[2])
    return config  # cannot be predicted


def trace_configs(configs, device, device_type, world_size, memory_gb):
    """Predicts all of each config, for the sake of the traces. One that fails is left to whoever needs it."""
    for config in configs:
        with contextlib.suppress(Exception):
            predict.predict_memory(config, device_type, world_size)
            if memory_gb:
                predict.cells_that_fit(config, memory_gb * 1e9, device_type, world_size)
        with contextlib.suppress(Exception):
            predict.predict_time(config, device, device_type, world_size)


@contextlib.contextmanager
def processes(n):
    """Yields n processes, and kills them in the end."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(n):
            # In a session of its own: Ctrl-C reaches this process alone.
            pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
            process = subprocess.Popen(COMMAND, **pipes, env=child_environment(), start_new_session=True)
            stack.callback(process.communicate)  # closes the pipes
            stack.callback(process.kill)
            found.append(process)
        yield found


def answer(requests, answers):
    """Answers requests, files of bytes both, until they end."""
    with contextlib.suppress(EOFError):
        while True:
            request = pickle.load(requests)
            traced.clear()
            trace_configs(*request)
            pickle.dump(traced, answers)
            answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "wb") as answers:  # whoever asked may be gone
        os.dup2(2, 1)  # libraries print to stderr
        answer(sys.stdin.buffer, answers)
