"""How far something is, in a line of the terminal that moves and is gone afterwards. Knows no models."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from specdec.engine.decoding import Event, Prefill, Prompt, Step
from specdec.loaders import download
from specdec.runtime import code_cache
from specdec.ui.output import printable, time_left
from specdec.ui.signals import in_foreground, signals
from specdec.ui.text_layout import cells, cut

LOADING, READING, WRITING, TIMING = "loading", "reading", "writing", "timing passes"
LEAST_BAR, BAR_CELLS = 6, 24
TICK_SECONDS = 0.2  # between two looks of a line
SHOW_SECONDS = 0.1  # between two messages
WORD_SECONDS = 5.0  # between two lines where there is no terminal
QUIET_SECONDS = 0.25  # what is over by then is not worth a line
LOOKS, ASCII_LOOKS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


class Bar(NamedTuple):
    """What is being done, the share of it that is done, and words behind it."""

    doing: str
    share: float
    more: str = ""

    def text(self, width: int, is_utf: bool) -> str:
        """In a line of that width: the bar gives way first, then what is being done."""
        full, ellipsis = "━…" if is_utf else "=."
        end = f" {self.share:4.0%}{self.more}"
        doing = cut(self.doing, width - LEAST_BAR - 1 - cells(end), ellipsis)
        n = min(BAR_CELLS, width - cells(doing) - 1 - cells(end))
        return cut(f"{doing} {full * round(n * min(1.0, self.share)):{max(n, 0)}}{end}", width, ellipsis)


Message = str | Bar
Show = Callable[[Message], None]


class Line:
    """A line on stderr that tells what is being done, where that is a terminal in whose foreground this job is.

    A thread moves it, so that one sees that something is. after: seconds before it is shown at all. Elsewhere what takes long
    says every few seconds how far it is.
    """

    def __init__(self, message: Message, after: float) -> None:
        self._message, self._doing = message, ""
        self._first = time.monotonic() + after
        self._is_terminal = sys.stderr.isatty()
        self._is_utf = (sys.stderr.encoding or "").lower().startswith("utf")
        self._looks = LOOKS if self._is_utf else ASCII_LOOKS
        self._n_looks = self._width = 0
        self._writing = threading.RLock()
        self._over = threading.Event()
        self._next_word = time.monotonic() + WORD_SECONDS
        self._download, self._n_first, self._begin, self._last = ("", 0), 0, 0.0, 0.0

    def begin(self) -> None:
        self.show(self._message)
        if self._is_terminal and os.environ.get("TERM") != "dumb":  # which may take each look for a row
            with suppress(RuntimeError):  # no thread to be had: it stands still
                threading.Thread(target=self._move, daemon=True).start()

    def show(self, message: Message) -> None:
        """Tell this from now on."""
        with self._writing:
            self._message = message
            self._draw()
            if not self._is_terminal and isinstance(message, Bar) and time.monotonic() > self._next_word:
                self._next_word = time.monotonic() + WORD_SECONDS
                with suppress(OSError, ValueError):
                    print(f"specdec: {message.doing}:{message.share:4.0%}{message.more}", file=sys.stderr, flush=True)

    def compiling(self, name: str, n_begun: int) -> None:
        """See `cache.on_compiling`."""
        with self._writing:
            self._doing = f"compiling {n_begun}, {code_cache.why(name)}: {name}" if name else ""
            self._draw()

    def downloading(self, name: str, n: int, total: int) -> None:
        """Show how much of a download is here. See `download.on_progress`."""
        now = time.monotonic()
        if self._download != (name, total):
            self._download, self._n_first, self._begin = (name, total), n, now
        elif now > self._last + SHOW_SECONDS:
            self._last = now
            left = time_left(now - self._begin, (n - self._n_first) / max(total - self._n_first, 1))
            of = f" of {total / 1e6:,.0f} MB{left}" if total else f", {n / 1e6:,.0f} MB"
            self.show(Bar(f"downloading {name}", n / total if total else 0.0, of))

    def end(self) -> None:
        """Nothing is left of it, nor of the ^C of who ended it."""
        with self._writing:  # or whoever loads would show another message before the process has ended
            if not self._over.is_set():
                self._over.set()
                self._write(" " * min(self._width + len("^C"), self._room))

    @property
    def _room(self) -> int:
        try:
            return max((os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1, 1)
        except OSError:
            return 79

    def _move(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            with self._writing:
                self._n_looks += 1
                self._draw()

    def _draw(self) -> None:
        message, room = self._doing or self._message, self._room - 2
        if self._over.is_set() or not message or time.monotonic() < self._first:
            return
        text = message.text(room, self._is_utf) if isinstance(message, Bar) else message
        text = cut(printable(text).replace("\n", " ").replace("\t", " "), room, "…" if self._is_utf else ".")
        row = cut(f"{self._looks[self._n_looks % len(self._looks)]} {text}", self._room, "")
        self._write(row + " " * min(self._width - cells(row), self._room - cells(row)))
        self._width = max(self._width, cells(row))

    def _write(self, row: str) -> None:
        if self._is_terminal and in_foreground(sys.stderr):
            with suppress(OSError):  # the terminal has gone
                os.write(sys.stderr.fileno(), f"\r{row}\r".encode(sys.stderr.encoding or "ascii", errors="replace"))


@contextmanager
def loading(message: Message = LOADING, after: float = 0.0) -> Iterator[Show]:
    """Around all that writes no output: a terminal shows the message meanwhile, and a disk's trouble is not the output's.

    Gives what shows another message instead.
    """
    line = Line(message, after)
    with signals.undone(line.end, do=line.begin):
        code_cache.on_compiling.append(line.compiling)
        download.on_progress.append(line.downloading)
        try:
            yield line.show
        except OSError as error:
            raise ValueError(f"cannot load: {error.filename or 'a file'}: {error.strerror or error}") from None
        finally:
            code_cache.on_compiling.remove(line.compiling)
            download.on_progress.remove(line.downloading)


def telling(show: Show, doing: str) -> Callable[[float], None]:
    """What shows a share that is done as a bar, with the time that is left; not so often that it would cost any."""
    begin, last = time.monotonic(), 0.0

    def tell(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + SHOW_SECONDS:
            last = now
            show(Bar(doing, share, time_left(now - begin, share)))

    return tell


def read_in_a_line(events: Iterator[Event | Prefill], n_unseen: int = 0) -> Generator[Event | Prefill]:
    """The events, behind a line that tells how far the prompt is read where that takes its time.

    n_unseen: how many tokens may follow that nobody shows as they come, so that the line goes on with them.
    """
    with ExitStack() as line:
        show, n, is_up = line.enter_context(loading(READING, QUIET_SECONDS)), 0, True
        read = tell = telling(show, READING)
        for event in events:
            if isinstance(event, Prefill):
                if not (is_up and event.share):  # it is read anew
                    show = show if is_up else line.enter_context(loading(READING, QUIET_SECONDS))
                    read, is_up = telling(show, READING), True
                read(event.share)
            elif not n_unseen:
                line.close()
                is_up = False
            elif isinstance(event, Step):
                n += len(event.tokens)
                tell(n / n_unseen)
            elif isinstance(event, Prompt):
                tell = telling(show, WRITING)
            yield event
