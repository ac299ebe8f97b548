"""The output of --version, and one-line errors, without loading any dependency."""

import os
import sys
from typing import NoReturn

from specdec import __arithmetic__, __version__


def print_version() -> None:
    """Print the package version and the arithmetic revision, which the output for a seed depends on.

    Loads nothing outside the standard library.
    """
    try:
        print(f"specdec {__version__}, arithmetic {__arithmetic__}", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout once more at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(141)  # what a shell reports for SIGPIPE
        exit_with_error(f"cannot write the output: {error.strerror}")


def exit_with_error(message: str) -> NoReturn:
    """Print an error message as one line on stderr and exit with code 2."""
    if sys.stderr:
        print(f"specdec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
