"""How a run ends: a line on stderr, a reader that has left, a full disk. Knows no options."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from specdec.ui.output import on_one_line

BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


@contextmanager
def writing() -> Iterator[None]:
    """Around all output: a reader that has seen enough ends it quietly, a full disk is told in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # let the interpreter's last flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE if isinstance(error, BrokenPipeError) else complain(f"cannot write the output: {error.strerror}")
        raise typer.Exit(code) from None


def complain(message: str) -> int:
    """The exit code of what the person at the keyboard can mend, once it is told."""
    say(message)
    return 2


def say(message: str) -> None:
    """One line on stderr."""
    with suppress(OSError):
        print(f"specdec: {on_one_line(message)}", file=sys.stderr)
