"""How far something is, in a line of the terminal that is gone afterwards. Knows no models."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .interrupts import signals
from .machine import cache

LOADING = "loading"
BAR_CELLS = 24


def progress_bar(name: str, share: float) -> str:
    """How far the loading of a model is, in a line."""
    return f"loading {name} {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}"


@contextmanager
def loading(message: str = LOADING) -> Iterator[Callable[[str], None]]:
    """Around all that writes no output: a terminal shows the message meanwhile, and a disk's trouble is not the output's.

    Gives what shows another message instead.
    """
    is_shown = bool(message) and sys.stderr.isatty()
    room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if is_shown else 0
    width = n_compiled = 0
    writing = threading.RLock()

    def show(line: str) -> None:
        nonlocal width
        with writing:
            if is_shown:
                width = max(width, len(line))
                with suppress(OSError):  # the terminal has gone
                    os.write(sys.stderr.fileno(), f"\r{line.ljust(width)[:room]}\r".encode(errors="replace"))

    def erase() -> None:
        show(" " * (width + len("^C")))

    def end() -> None:
        nonlocal is_shown
        with writing:  # or whoever loads would show another line before the process has ended
            erase()
            is_shown = False

    def compiling(name: str) -> None:
        nonlocal n_compiled
        n_compiled += 1
        show(f"a first run compiles, 10 to 20 seconds: {name} ({n_compiled})")

    with signals.at_sudden_end(end, do=lambda: show(message)):
        cache.on_compiling.append(compiling)
        try:
            yield show
        except OSError as error:
            raise ValueError(f"cannot load: {error.filename or 'a file'}: {error.strerror or error}") from None
        finally:
            cache.on_compiling.remove(compiling)
            erase()


def telling(show: Callable[[str], None], doing: str) -> Callable[[float], None]:
    """What shows a share that is done as a bar, with the time that is left; not so often that it would cost any."""
    begin, last = time.monotonic(), 0.0

    def tell(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + 0.1:
            last = now
            left = f", {(now - begin) * (1 - share) / share:.0f} s left" if share > 0.01 else ""
            show(f"{doing} {'━' * round(BAR_CELLS * share):{BAR_CELLS}} {share:4.0%}{left}")

    return tell
