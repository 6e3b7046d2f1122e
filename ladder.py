"""Prints the ladder, its programs and diffs: python ladder.py COMMAND (--help lists the commands)"""

from lab.show import main
from nanoladder.entry import run_script

if __name__ == "__main__":
    run_script(main)
