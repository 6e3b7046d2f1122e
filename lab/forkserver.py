"""Fork server: forks processes that measure from one that has imported torch and the compiler: python -m lab.forkserver

Reads requests from stdin, one a line, and answers each with a line; both are JSON. To [module, arguments], it runs the
module's main in a fork of itself and answers with its process id. To a process id, it waits for that fork and answers
[exit code, stdout, stderr]. So several forks can run at a time. Ends with stdin. A fork is as good as a new process as
long as its parent has nothing that does not survive a fork: no CUDA context, no parallel region, no threads of the
compiler. So the server computes nothing. Importing the compiler asks if there is a GPU: PYTORCH_NVML_BASED_CUDA_CHECK=1
lets PyTorch answer without CUDA. Where that is not enough, the fork replaces itself by a new process.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import warnings
from nanoladder.entry import run_script

import torch
import torch._inductor.compile_fx  # a second of imports, and more of the compiler's with it

from lab import measure  # noqa: F401  (and all that it needs)


def serve():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the server without a traceback
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # NumPy's idle OpenBLAS
    outputs = {}  # process id of a fork: the files of its stdout and stderr
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            answer = wait(request, *outputs.pop(request))
        else:
            files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 wait() closes them
            answer = os.fork()
            if answer == 0:
                return become(*request, *files)
            outputs[answer] = files
        print(json.dumps(answer), flush=True)


def wait(child, out, err):
    """Waits until a fork has ended. Returns its exit code and the contents of the two files, which are closed."""
    _, status = os.waitpid(child, 0)
    with out, err:
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


def become(module, argv, out, err):
    """Turns a fork of the server into `python -m module argv`, its output into the two files."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing:
        for file, descriptor in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(file.fileno(), descriptor)
    if torch.cuda._is_in_bad_fork():
        os.execv(sys.executable, [sys.executable, "-m", module, *argv])
    sys.argv = [module, *argv]
    run_script(importlib.import_module(module).main)


if __name__ == "__main__":
    serve()
