"""Stages of the ladder, their programs and the diffs between them.

    python ladder.py [list]       lists the stages in order
    python ladder.py show NAME    prints the training program with the stages up to NAME and no others
    python ladder.py diff NAME    prints the lines that a stage changes; diff A B: the lines between two stages
    python ladder.py docs         writes docs/ladder.md, the ladder as a tutorial
    python ladder.py html         writes docs/ladder.html, the ladder as a page to climb in a browser

A shown program runs from this folder; --stage=NAME sets the config in its header and checkpoints:
python ladder.py show amp > amp.py && python amp.py config/x.py --stage=amp
"""

import sys

from lab import pages
from lab.page import build
from nanoladder.config import stage_files, stage_names
from nanoladder.config.stages import reason
from nanoladder.errors import BadInput

COLORS = {"@": "\033[36m", "-": "\033[31m", "+": "\033[32m"}


def main(argv):
    match argv:
        case [] | ["list"]:
            print_list()
        case ["-h" | "--help"]:
            print(__doc__, end="")
        case ["show", name]:
            print(pages.script(name), end="")
        case ["diff", name]:
            position = len(stage_files(name)) - 1
            if position == 0:
                raise BadInput(f"{name} is the first stage; expected `python ladder.py show {name}`, or a later stage")
            print_diff(pages.diff(stage_names()[position - 1], name))
        case ["diff", a, b]:
            print_diff(pages.diff(a, b))
        case ["docs"]:
            pages.write()
        case ["html"]:
            build.write()
        case _:
            raise BadInput(f"ladder.py {' '.join(argv)}: expected list, show NAME, diff NAME, diff A B, docs or html")


def print_list():
    rows = [(name, pages.change(name), reason(name)) for name in stage_names()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, text, why in rows:
        print(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {why}")


def print_diff(lines):
    for line in lines:
        color = COLORS.get(line[0]) if sys.stdout.isatty() else None
        print(f"{color}{line}\033[0m" if color else line)
