"""Entry of a script: its command line, and one line for bad input."""

import argparse
import os
import sys

from nanoladder.errors import BadInput


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser that raises BadInput for a bad option."""

    def error(self, message):
        raise BadInput(f"{message}; --help lists every option")


def run_script(main):
    """Calls main(argv). Bad input ends in one line on stderr and exit code 2, never in a traceback.

    If torchrun started several processes, a line that all of them would print is printed once.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        from torch.distributed.elastic.multiprocessing.errors import record  # only now: torch takes seconds to load

        from nanoladder.parallel import already_printed

        main = record(main)  # torchrun can then tell which process failed first
    try:
        main(sys.argv[1:])
    except BadInput as error:
        text = " ".join(str(error).split())  # one line and no escape sequences, whatever the values hold
        line = "error: " + "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        if not (several and already_printed(line)):
            print(line, file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        if several and isinstance(stop.code, str) and already_printed(stop.code):
            sys.exit(1)
        raise
