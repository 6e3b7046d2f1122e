"""Traces the steps of several configs at a time, each in another process; predict.py then finds the traces.

Nearly all of a prediction is the compiler's work, on one core. Such a process is `python -m lab.ahead`: it reads
requests from stdin and answers each with its traces, both pickled, until stdin ends.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from lab import predict
from lab.trace import traced
from nanoladder import machine
from nanoladder.config import Config
from nanoladder.data.encode import n_cores
from nanoladder.errors import BadInput
from nanoladder.run.memory import child_environment

COMMAND = [sys.executable, "-m", "lab.ahead"]
PROCESS_BYTES = 1e9  # of memory: a process that traces GPT-2's blocks, compiled, takes 0.6 GB


def trace_rows(rows, device, device_type="cpu", world_size=1, memory_gb=None):
    """Yields the rows (name, config) in their order, each as soon as all traces are taken that its predictions need.

    Rows that share a trace make a group. If several groups are compiled, as many processes as there are cores and
    memory for take them in turn, this one among them. If one dies, another takes its group.
    """
    conditions, groups = (device, device_type, world_size, memory_gb), {}
    keys = [isinstance(row, Config) and shared_traces(row, device_type, world_size) for _, row in rows]
    for key, (_, row) in zip(keys, rows, strict=True):
        groups.setdefault(key, []).append(row)
    groups.pop(False, None)  # errors
    n_compiled = sum(config.compile for config, *_ in groups.values())
    n = min(n_cores(), int(machine.free_memory(torch.device("cpu")) // PROCESS_BYTES), n_compiled) - 1
    left, done, events = deque(groups), {False}, SimpleQueue()

    def trace_in(process):
        with contextlib.suppress(IndexError):
            while True:
                key = left.popleft()
                try:
                    traced.update(ask(process, groups[key], *conditions))
                    events.put(key)
                except (EOFError, OSError, pickle.UnpicklingError):
                    left.appendleft(key)
                    return events.put(False)

    with ThreadPoolExecutor(max(n, 1)) as threads, processes(n) as others:
        for process in others:
            threads.submit(trace_in, process)
        for key, row in zip(keys, rows, strict=True):
            while key not in done:
                try:
                    mine = left.popleft()
                except IndexError:
                    done.add(events.get())  # of another process
                else:
                    trace_configs(groups[mine], *conditions)
                    done.add(mine)
                while not events.empty():
                    done.add(events.get())
            yield row


def ask(process, *request):
    """The process's answer. Raises EOFError, OSError or UnpicklingError if it dies."""
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def shared_traces(config, device_type, world_size):
    """A key that configs have in common whose memory is from the same traces."""
    with contextlib.suppress(BadInput):
        return tuple(predict.needed_traces(config, device_type, world_size)[2])
    return config  # cannot be predicted


def trace_configs(configs, device, device_type, world_size, memory_gb):
    """Predicts all of each config, for the sake of the traces. One that fails is left to whoever needs it."""
    for config in configs:
        with contextlib.suppress(Exception):
            predict.predict_row("", config, device, device_type, world_size, memory_gb)


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
