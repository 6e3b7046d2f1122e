"""Entry point of a script: its command line, and one-line errors."""

import argparse
import os
import sys

from nanoladder.errors import BadInput


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser that raises BadInput for an invalid option."""

    def error(self, message):
        raise BadInput(f"{message}; --help lists every option")


def run_script(main):
    """Calls main(argv). On BadInput, prints one line to stderr instead of a traceback and exits with code 2.

    On Ctrl-C, unless main handles it, exits with code 130.
    Under torchrun, prints a line that several processes end with only once.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        from torch.distributed.elastic.multiprocessing.errors import record  # imported late: torch loads slowly

        from nanoladder.parallel import already_printed

        main = record(main)  # lets torchrun report which process failed first
    try:
        main(sys.argv[1:])
    except BadInput as error:
        text = " ".join(str(error).split())  # one line; control characters are escaped below
        line = "error: " + "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        if not (several and already_printed(line)):
            print(line, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as shells report Ctrl-C
    except SystemExit as stop:
        if several and isinstance(stop.code, str) and already_printed(stop.code):
            sys.exit(1)
        raise
