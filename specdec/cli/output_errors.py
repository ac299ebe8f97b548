"""How a run ends: error lines on stderr, closed pipes and full disks."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from specdec.ui.plain_views import sanitize_line

BROKEN_PIPE_EXIT_CODE = 141  # what a shell reports for SIGPIPE


@contextmanager
def guard_output() -> Iterator[None]:
    """Flush stdout at the end of the context, and turn an OSError within it into an exit code.

    A closed pipe exits quietly with code 141; another error, such as a full disk, prints one line and exits with code 2.

    Raises:
        typer.Exit: Output could not be written.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = (
            BROKEN_PIPE_EXIT_CODE
            if isinstance(error, BrokenPipeError)
            else report_error(f"cannot write the output: {error.strerror}")
        )
        raise typer.Exit(code) from None


def report_error(message: str) -> int:
    """Print an error that the user can fix on stderr, and return the exit code of such errors, 2."""
    print_message(message)
    return 2


def print_message(message: str) -> None:
    """Print a message as one line on stderr, with "specdec: " in front and without control characters."""
    with suppress(OSError):
        print(f"specdec: {sanitize_line(message)}", file=sys.stderr)
