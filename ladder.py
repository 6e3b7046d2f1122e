"""Prints the ladder, its programs and their diffs: python ladder.py COMMAND (--help lists the commands)

The docstring of a command's function is its --help.
"""

import argparse
import inspect
import shutil
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # omitted by python -P

from lab.measure import cli
from lab.programs import diffs, markdown, stages
from lab.programs.bundle import standalone
from lab.programs.html import build
from lab.research import records, records_report, referee
from nanoladder import files
from nanoladder.config.stages import RECIPE_DIR, reason, stage_below, tree
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput

HTML = Path("out/pages/index.html")  # in a folder that any web server shows as it is
COLORS = {"@": "\033[36m", "-": "\033[31m", "+": "\033[32m"}


def main(argv):
    options, surplus = command_line().parse_known_args(argv)
    if surplus:
        options.parser.error(f"unrecognized arguments: {' '.join(surplus)}")
    options.run(options)


def command_line():
    """Returns the parser. Its options have `run`, the function of a command, and `parser`, the command's own."""
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    program, text = "python ladder.py", "Prints the ladder, its programs and their diffs."
    parser = Parser(program, f"{program} [-h] [COMMAND ...]", text, **raw)
    parser.set_defaults(run=print_list, parser=parser)
    commands = parser.add_subparsers(title="commands (without one: list)", prog=program, metavar="COMMAND")

    def add(name, run, **settings):
        text = inspect.getdoc(run)
        command = commands.add_parser(name, description=text, help=text.splitlines()[0], **raw, **settings)
        command.set_defaults(run=run, parser=command)
        return command

    add("list", print_list)
    show = add("show", print_program)
    show.add_argument("name", metavar="NAME", help="a stage or a rung")
    show.add_argument("--standalone", action="store_true", help="one file that imports nothing of nanoladder")
    diff = add("diff", print_diff, usage="%(prog)s [-h] [--program] NAME | A B")
    diff.add_argument("name", metavar="NAME | A", help="a stage or a rung, compared with the one that it stands on")
    diff.add_argument("other", nargs="?", metavar="B", help="another, compared with A instead")
    diff.add_argument("--program", action="store_true", help="the changed lines alone, without definitions")
    add("records", print_records)
    check = add("check", check_entry)
    check.add_argument(
        "entry", metavar="FOLDER", help="an entry of the race, such as records/below_counting/004_exclusive"
    )
    check.add_argument(
        "--seeds", type=cli.at_least(1), default=records.SEEDS, help="number of seeds (default: %(default)s)"
    )
    check.add_argument("--quick", action="store_true", help="the rules, and the record before it on two seeds: minutes")
    add("docs", write_docs)
    html = add("html", write_html)
    html.add_argument("results", nargs="*", type=Path, metavar="FILE", help="a runs.jsonl that profile.py wrote")
    html.add_argument("--output", type=Path, metavar="PATH", help=f"the file to write (default: {HTML})")
    return parser


def print_list(options):
    """Lists the stages and the rungs: the name of each in its tree, and what it does."""
    first, second = "stages: a cheaper step (--stage=NAME)", "\nrungs: token efficiency (--recipe=NAME)"
    columns = shutil.get_terminal_size().columns
    for title, ladder in ((first, tree()), (second, tree(RECIPE_DIR))):
        print(title)
        rows = [*ladder]
        width = max(len(lines + name) for lines, name in rows)
        for lines, name in rows:
            first, *more = textwrap.wrap(reason(name), max(20, columns - width - 2))
            print(f"{lines + name:<{width}}  {first}")
            for text in more:
                print(f"{lines.replace('├', '│').replace('└', ' '):<{width}}  {text}")


def print_program(options):
    """Prints the training program of a stage or a rung.

    It has the stages from the first up to NAME and no others, and runs from this
    folder. --stage=NAME (or --recipe=NAME) sets its config:

        python ladder.py show amp > amp.py && python amp.py config/x.py --stage=amp

    With --standalone it is one file that imports nothing but torch and numpy (and
    torchao at low_memory_optimizer). It trains on a dataset's folder, also under
    torchrun, prints losses, saves the weights and prints a sample:

        python ladder.py show amp --standalone > amp.py
        python amp.py data/python_stdlib
    """
    print(standalone(options.name) if options.standalone else diffs.script(options.name), end="")


def print_diff(options):
    """Prints the lines that a stage or a rung changes in the program.

    They are compared with the program of the stage that NAME stands on; of A and
    B, with that of A. Then come the definitions in nanoladder/ and operators/ that
    the changed lines newly call.
    """
    a, b = (options.name, options.other) if options.other else (stage_below(options.name), options.name)
    if not a:
        raise BadInput(f"{b} is the first of its ladder; expected `python ladder.py show {b}`, or a later one")
    lines = list(diffs.diff(a, b))
    if not (lines or options.other):
        print(f"{stages.change(b)}. {stages.SAME}\n")
        lines = list(diffs.diff(a, b, standalone))
    for line in lines:
        color = COLORS.get(line[0]) if sys.stdout.isatty() else None
        print(f"{color}{line}\033[0m" if color else line)
    for path, source in [] if options.program else diffs.definitions(a, b):
        print(f"\n# {path}\n\n{source}")


def print_records(options):
    """Prints the entries of the races, which records/README.md explains."""
    print(records_report.on_terminal())


def check_entry(options):
    """Checks an entry of a race.

    Its config files and patch run with your rights: read them first. It checks the
    rules, then whether the entry holds, against the record before it and the naive
    loop, on seeds derived from its digest, and writes MACHINE.jsonl to its folder.
    The same command continues. Exit code: 0 if it holds, 1 if not, 2 if it breaks a
    rule.
    """
    sys.exit(referee.check(options))


def write_docs(options):
    """Writes the pages generated from code and results.

    They are docs/ladder.md, the ladder as a tutorial; records/tried.md; and the
    tables of README.md, docs/results.md and the races. Run it after a change of
    train.py, model.py, stages, rungs, results or records.
    """
    files.write(markdown.PAGE, markdown.page())
    files.write(markdown.RESULTS, markdown.results())
    files.write(markdown.README, markdown.readme())
    records_report.write_pages()


def write_html(options):
    """Writes the ladder as a page to climb in a browser.

    With files of your own results, such as results/MACHINE/CONFIG/runs.jsonl, it
    shows your figures as well, and goes to ladder.html beside the first of them
    unless --output names another file.
    """
    beside = options.results[0].with_name("ladder.html") if options.results else HTML
    path = options.output or beside
    build.write(path, tuple(options.results))
    print(f"wrote {path}: open it in a browser")


if __name__ == "__main__":
    run_script(main)
