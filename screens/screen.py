"""Frames on a terminal that leave nothing behind. Knows no views and no models."""

import os
from contextlib import ExitStack

from rich.console import Console, ConsoleDimensions

from .interrupts import signals

# The second page, which the terminal takes away again; no cursor; rows that are too long are cut, not broken
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
ERASE = "\r\x1b[J"
LEAVE = f"\x1b[?2026l{ERASE}\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # between which a terminal that knows them shows nothing


class Screen:
    """A terminal that shows one frame after the other in the same rows.

    They begin where the cursor stood, and it waits in the first of them: it stays there when the terminal is resized, and on a
    terminal of one page nothing above is touched.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._opened = ExitStack()
        self._size: ConsoleDimensions | None = None  # of the last frame, while there is one
        self._n_rows = 0

    @property
    def is_open(self) -> bool:
        return self._size is not None

    @property
    def is_resized(self) -> bool:
        return self._size is not None and self._size != self._console.size

    def draw(self, rows: list[str], size: ConsoleDimensions) -> None:
        """Rows that were made for a terminal of that size: none wider, and fewer than it has."""
        if self._size is None:
            self._open()
        frame = [BEGIN_FRAME]
        if self._size and size.height < self._size.height:  # some terminals move up what they show, and not the cursor
            frame.append(f"\x1b[{self._size.height - size.height}A")
        if size != self._size or len(rows) != self._n_rows:
            frame.append(ERASE)
        self._size, self._n_rows = size, len(rows)
        frame += ["\r", "\r\n".join(rows), f"\x1b[{len(rows) - 1}A\r" if len(rows) > 1 else "\r", END_FRAME]
        self._write("".join(frame))

    def close(self) -> None:
        self._size = None
        self._opened.close()

    def _open(self) -> None:
        with ExitStack() as opening:
            opening.enter_context(signals.at_sudden_end(self._leave_at_once, do=lambda: self._write(ENTER)))
            opening.callback(self._write, LEAVE)
            self._opened = opening.pop_all()

    def _leave_at_once(self) -> None:
        os.write(self._console.file.fileno(), LEAVE.encode())

    def _write(self, codes: str) -> None:
        self._console.file.write(codes)
        self._console.file.flush()
