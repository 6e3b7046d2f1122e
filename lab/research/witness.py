"""Runs train.py and records what its Python opens and connects to.

python lab/research/witness.py NOTES.txt [words of train.py]

referee.py reads the notes, a line each. All caches and temporary files go to the folder of the notes.
"""

import os
import runpy
import sys
from pathlib import Path


def main(notes, *words):
    root, file = Path(__file__).resolve().parents[2], os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(event, arguments):
        if event == "open" and not isinstance(arguments[0], int):  # else a file that is open already
            os.write(file, f"{os.path.abspath(os.fsdecode(arguments[0]))}\n".encode())
        elif event == "socket.connect" and isinstance(arguments[1], tuple):  # not a socket of this machine's own
            os.write(file, f"the network, {arguments[1][0]}\n".encode())

    for variable in ("TMPDIR", "MPLCONFIGDIR", "TRITON_CACHE_DIR"):
        os.environ[variable] = str(Path(notes).parent)
    sys.path[0], sys.argv = str(root), ["train.py", *words]
    sys.addaudithook(note)  # a fork, such as a worker of the loader, keeps it
    runpy.run_path(str(root / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
