"""Fork server: forks processes that measure from one that has imported torch and the compiler: python -m lab.forkserver

Reads the arguments of measure.py from stdin, a JSON list a line; runs them in a fork of itself; answers with a JSON
list [exit code, stdout, stderr]. Ends with stdin. A fork is as good as a new process as long as its parent has nothing
that does not survive a fork: no CUDA context, no parallel region, no threads of the compiler. So the server computes
nothing. Importing the compiler asks if there is a GPU: PYTORCH_NVML_BASED_CUDA_CHECK=1 lets PyTorch answer without
CUDA. Where that is not enough, the fork replaces itself by a new process.
"""

import json
import os
import signal
import sys
import tempfile
import warnings

import torch
import torch._inductor.compile_fx  # a second of imports, and more of the compiler's with it

from lab import measure
from nanoladder.entry import run_script


def serve():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the server without a traceback
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # NumPy's idle OpenBLAS
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                return become(json.loads(line), out, err)
            _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), out.read(), err.read()]), flush=True)


def become(argv, out, err):
    """Turns a fork of the server into `python -m lab.measure argv`, its output into the two files."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing:
        for file, descriptor in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(file.fileno(), descriptor)
    if torch.cuda._is_in_bad_fork():
        os.execv(sys.executable, [sys.executable, "-m", "lab.measure", *argv])
    sys.argv = ["lab.measure", *argv]
    run_script(measure.main)


if __name__ == "__main__":
    serve()
