"""The output of --version, and one-line errors, without loading any dependency."""

import os
import sys
from typing import NoReturn

from specdec import __arithmetic__, __version__


def print_version() -> None:
    """Print the version, and what a seed's text depends on. Loads nothing that is not Python's own."""
    try:
        print(f"specdec {__version__}, arithmetic {__arithmetic__}", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter's last flush goes
        if isinstance(error, BrokenPipeError):
            sys.exit(141)  # what a shell reports for SIGPIPE
        refuse(f"cannot write the output: {error.strerror}")


def refuse(message: str) -> NoReturn:
    if sys.stderr:
        print(f"specdec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
