"""How a script begins and ends: its command line, and bad input in one line."""

import argparse
import os
import sys

from nanoladder.errors import BadInput


class Parser(argparse.ArgumentParser):
    """argparse, but a bad option is BadInput."""

    def error(self, message):
        raise BadInput(f"{message}; --help lists every option")


def run(main):
    """Calls main(argv). Bad input ends in one line on stderr and exit code 2, never in a traceback.

    Where torchrun started several processes, what all of them would say is said once.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        from torch.distributed.elastic.multiprocessing.errors import record

        from nanoladder.parallel import said_before

        main = record(main)  # so that torchrun can tell which process failed first
    try:
        main(sys.argv[1:])
    except BadInput as error:
        text = " ".join(str(error).split())  # one line, whatever the values hold, and no escape sequences
        line = "error: " + "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        if not (several and said_before(line)):
            print(line, file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        if several and isinstance(stop.code, str) and said_before(stop.code):
            sys.exit(1)
        raise
