"""Entry point of a script: its command line, and one-line errors."""

import argparse
import atexit
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nanoladder import files
from nanoladder.errors import BadInput, nearest


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser that raises BadInput for an invalid option or choice, and expands ~ in --option=~/x.

    Shells leave ~ there as it is. An option with the metavar TEXT takes no path.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        texts = [name for action in self._actions if action.metavar == "TEXT" for name in action.option_strings]
        words = list(sys.argv[1:] if args is None else args)
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.startswith("--") and name not in texts:
                words[i] = name + equals + files.expand(value)
                if equals and not value and name in self._option_string_actions:
                    self.error(f"argument {name}: no value given")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += nearest(choice[1], re.findall(r"[^\s',]+", choice[2]))
        elif words := re.search(r"^unrecognized arguments: ((\S+).*)", message):
            message += self.advice(words[2], words[1])
        elif message.endswith("expected one argument"):
            message += f", as in {message.split()[1].rstrip(':')}=VALUE"
        else:
            for kind, expected in (("int", "a whole number"), ("float", "a number")):
                message = message.replace(f"invalid {kind} value:", f"expected {expected}, not")
        raise BadInput(f"{message}; --help lists every option")

    def advice(self, word: str, words: str) -> str:
        """Returns the end of a message about a word that is not an option, "did you mean ..." or "expected ..."."""
        options, (name, equals, value) = self._option_string_actions, word.partition("=")
        near = nearest(name, options, key=lambda option: option.strip("-"))
        if name.startswith("-") or (equals and near):
            return near if name.startswith("-") else near.replace("'?", f"={value}'?")
        if "--out_dir" in options and os.path.isdir(words):
            return f", did you mean '--out_dir={words}'?"
        positional = any(not action.option_strings for action in self._actions)
        return "" if positional else ", expected --option=value, in quotes if it has spaces"


def run_script(main: Callable[[list[str]], object]) -> None:
    """Calls main(argv). On BadInput, prints one line to stderr instead of a traceback and exits with code 2.

    On Ctrl-C, unless main handles it, exits with code 130. If stdout cannot be written, exits with code 1, or silently
    with 141 if its reader, such as `head`, has exited.
    Under torchrun, an error line shared by several processes is printed only once.
    """
    open_closed_streams()
    several = os.environ.get("WORLD_SIZE", "") not in ("", "1")
    if several:
        from torch.distributed.elastic.multiprocessing import errors  # imported late: torch loads slowly

        from nanoladder.parallel import already_printed

        main = errors.record(main)  # lets torchrun report which process failed first
    prepare_output()
    try:
        main(sys.argv[1:])
    except BadInput as error:
        text = " ".join(str(error).split())  # one line; control characters are escaped below
        line = "error: " + "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        if not (several and already_printed(line)):
            print(line, file=sys.stderr)
        if several:
            error.__traceback__ = None  # so that torchrun's summary repeats only the line
            errors.get_error_handler().record_exception(error)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as stop:
        if several and isinstance(stop.code, str) and already_printed(stop.code):
            sys.exit(1)
        if not stop.code:
            end_if_stdout_fails()  # argparse ignores it
        if several and not isinstance(stop.code, str):
            end_one_of_several(stop.code or 0)
        raise
    except OSError:
        end_if_stdout_fails("\n")  # an empty line above the traceback of any other failure
        raise
    if several:
        end_one_of_several(0)


def end_one_of_several(code):
    """Ends the process before Python frees its objects: an object freed later by a gloo thread would abort it."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def open_closed_streams():
    """Opens closed standard streams (`>&-`, some services) on the null device, for child processes too.

    Otherwise the next files opened, such as checkpoints, would take their descriptors and what is printed there.
    """
    for name in ("stdin", "stdout", "stderr"):  # by descriptor: open() takes the lowest free one
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def prepare_output():
    """Makes stdout flush every line, even to a file or pipe, and replace characters missing from its encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")


def end_if_stdout_fails(text=""):
    """Ends the program if the text, or pending output in stdout's buffer, cannot be written."""
    try:
        print(end=text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        if isinstance(error, BrokenPipeError):
            sys.exit(141)  # as shells report SIGPIPE
        print(f"error: stdout cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(1)


def end_on_signals() -> None:
    """Lets SIGTERM and, unless the caller ignores it, SIGHUP end a program and its child processes, with one line.

    As Ctrl-C does, they raise an exception that ends children and removes temporary folders. Output may then fail: the
    terminal may be gone.
    """
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # not on Windows
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def end(number, _):
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a shell sends SIGHUP again, while the program ends its children
        outlast_output()
        with contextlib.suppress(OSError):
            os.write(2, f"\nended by {signal.Signals(number).name}\n".encode())
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, end)


def outlast_output() -> None:
    """Lets the program continue if its output cannot be written: to a full disk, or a pipe without a reader."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), Unfailing):
            setattr(sys, name, Unfailing(stream))


class Unfailing:
    """A text stream that silently drops output that cannot be written."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()
