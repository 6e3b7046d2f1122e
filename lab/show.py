"""Stages of the ladder, their programs and the diffs between them.

    python ladder.py [list]       draws both ladders, the first with its branches; NAME is a stage of either
    python ladder.py show NAME    prints the training program with the stages from naive up to NAME and no others
    python ladder.py show NAME --standalone
                                  the same as one file that imports nothing but torch and numpy (torchao at
                                  low_memory_optimizer): python FILE.py TOKENS.bin, or with torchrun, prints the losses
    python ladder.py diff NAME    prints the lines that a stage changes, and the definitions that they newly call;
                                  diff A B: between two stages; --program: the lines alone
    python ladder.py docs         writes docs/ladder.md, the ladder as a tutorial, and the README's table
    python ladder.py html         writes docs/ladder.html, the ladder as a page to climb in a browser;
                                  html FILE...: with your own results.json, to ladder.html beside the first

A shown program runs from this folder; --stage=NAME (--recipe=NAME) sets the config in its header and checkpoints:
python ladder.py show amp > amp.py && python amp.py config/x.py --stage=amp
"""

import sys
from pathlib import Path

from lab import pages
from lab.link import standalone
from lab.page import build
from lab.stages import reason, tree
from nanoladder import files
from nanoladder.config.stages import RECIPE_DIR, stage_below
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
        case ["show", name, "--standalone"]:
            print(standalone(name), end="")
        case ["diff", *names]:
            print_diff(*stages([name for name in names if name != "--program"]), "--program" in names)
        case ["docs"]:
            files.write(pages.PAGE, pages.page())
            files.write(pages.README, pages.readme())
        case ["html", *own]:
            print(f"wrote {build.write(tuple(map(Path, own)))}: open it in a browser")
        case _:
            raise BadInput(
                f"ladder.py {' '.join(argv)}: expected list, show NAME, diff NAME, diff A B, docs or html [FILE...]"
            )


def stages(names):
    """Returns the two stages of a diff, of [NAME] or [A, B]. Raises BadInput."""
    match names:
        case [name]:
            if not (below := stage_below(name)):
                raise BadInput(f"{name} is the first stage; expected `python ladder.py show {name}`, or a later stage")
            return below, name
        case [a, b]:
            return a, b
    raise BadInput(f"ladder.py diff {' '.join(names)}: expected diff NAME or diff A B, and --program or nothing")


def print_list():
    stages, recipe = "stages: what a step costs (--stage=NAME)", "\nrecipe: what a step is worth (--recipe=NAME)"
    for title, ladder in ((stages, tree()), (recipe, tree(RECIPE_DIR))):
        print(title)
        rows = [(lines + name, pages.change(name), reason(name)) for lines, name in ladder]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, text, why in rows:
            print(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {why}")


def print_diff(a, b, program_alone):
    for line in pages.diff(a, b):
        color = COLORS.get(line[0]) if sys.stdout.isatty() else None
        print(f"{color}{line}\033[0m" if color else line)
    for path, source in [] if program_alone else pages.definitions(a, b):
        print(f"\n# {path}\n\n{source}")
