"""Prints the ladder's stages, their programs and their diffs: python ladder.py [list | show NAME | diff NAME | docs]"""

from lab.pages import main
from nanoladder.entry import run_script

if __name__ == "__main__":
    run_script(main)
