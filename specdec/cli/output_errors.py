"""Error lines, exit codes of failed output, and the version. Importing this module loads only the standard library."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from specdec import __arithmetic__, __version__

BROKEN_PIPE_EXIT_CODE = 141  # what a shell reports for SIGPIPE


@contextmanager
def guard_output() -> Iterator[None]:
    """Flush stdout at the end of the context, and exit on an OSError within it.

    A closed pipe exits quietly with code 141; another error, such as a full disk, prints one line and exits with code 2.

    Raises:
        SystemExit: Output could not be written.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(BROKEN_PIPE_EXIT_CODE)
        exit_with_error(f"cannot write the output: {error.strerror}")


def exit_with_error(message: str) -> NoReturn:
    """Print an error message as one line on stderr and exit with code 2, that of errors that the user can fix."""
    if sys.stderr:
        with suppress(OSError):
            print(f"specdec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def print_message(message: str) -> None:
    """Print a message as one line on stderr, with "specdec: " in front, and with options in place of the library's parameters."""
    from specdec.cli.option_fields import translate_parameters  # imported here, since they load typer and rich
    from specdec.ui.plain_views import sanitize_line

    with suppress(OSError):
        print(f"specdec: {sanitize_line(translate_parameters(message))}", file=sys.stderr)


def print_version() -> None:
    """Print the package version and the arithmetic revision, which the output for a seed depends on."""
    with guard_output():
        print(f"specdec {__version__}, arithmetic {__arithmetic__}")
