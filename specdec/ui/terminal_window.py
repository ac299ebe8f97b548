"""A window on a terminal: rows in frames and colours, keys meanwhile, and Ctrl-Z. Knows no views and no models."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console, ConsoleDimensions

from specdec.ui.keyboard import WISHES, Keyboard
from specdec.ui.signals import in_foreground, signals
from specdec.ui.text_layout import Row, cells, cut, width_of

# What terminals call select graphic rendition: the kinds of runs in a row
STYLES = {
    "prompt": "1", "target": "", "accepted": "32", "rejected": "9;31", "unread": "2;9", "proposed": "35",
    "strong": "1", "plain": "", "faint": "2", "edge": "2",
}  # fmt: skip
# without colour, the words have to differ in something else
STYLES_NO_COLOR = STYLES | {"accepted": "4", "rejected": "9", "proposed": "3"}
# The second page, which the terminal takes away again; no cursor; rows that are too long are cut, not broken
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
ERASE = "\r\x1b[J"
LEAVE = f"\x1b[?2026l{ERASE}\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # between which a terminal that knows them shows nothing
MIN_ROWS, MIN_WIDTH = 8, 20  # of a terminal that holds a frame with a text in it
WIDEST = 100  # cells: longer lines are hard to read


class Pen:
    """Rows of a frame, and the codes that a terminal draws them by."""

    def __init__(self, console: Console) -> None:
        self.is_utf = console.encoding.startswith("utf")
        self.ellipsis = "…" if self.is_utf else "..."
        self._styles = STYLES_NO_COLOR if console.no_color else STYLES

    def rule(self, width: int, corners: str, left: str, right: str) -> Row:
        """A line across the frame with words in it, as far as they fit."""
        if not self.is_utf:
            corners = "+-+"
        left = cut(left, width - 6 - (cells(right) + 4 if right else 0), self.ellipsis)
        fill = width - 4 - sum(cells(text) + 2 for text in (left, right) if text)
        words = [[(f" {text} ", "strong")] if text else [] for text in (left, right)]
        left_end, line, stub, right_end = [(text, "edge") for text in (corners[:2], corners[1] * fill, corners[1], corners[2])]
        return [left_end, *words[0], line, *words[1], stub, right_end]

    def progress(self, width: int, share: float) -> Row:
        """A line across the frame that shows a share of 1."""
        left, full, empty, right = "├━─┤" if self.is_utf else "+=-+"
        n = round((width - 2) * min(1.0, share))
        return [(left, "edge"), (full * n, "plain"), (empty * (width - 2 - n), "edge"), (right, "edge")]

    def framed(self, row: Row, inner: int) -> Row:
        """A row of at most `inner` cells between the frame's sides."""
        side = "│" if self.is_utf else "|"
        return [(side + " ", "edge"), *row, (" " * (inner - width_of(row) + 1), "plain"), (side, "edge")]

    def styled(self, row: Row) -> str:
        codes = [self._styles[kind] for _, kind in row]
        return "".join([f"\x1b[{code}m{text}\x1b[m" if code else text for (text, _), code in zip(row, codes, strict=True)])

    def codes(self, row: Row) -> str:
        """A row as a terminal draws it over what stood there. An edge has its column, however wide the text turns out."""
        parts, start = [] if row and row[-1][1] == "edge" else ["\x1b[K"], 0
        for i in range(1, len(row)):
            if row[i][1] == "edge" and row[i - 1][1] != "edge":
                parts += [self.styled(row[start:i]), f"\x1b[K\x1b[{width_of(row[:i]) + 1}G"]
                start = i
        return "".join([*parts, self.styled(row[start:])])


class Window:
    """Frames on the terminal's second page, and the keys that are pressed meanwhile, while it is `shown`.

    Each has the same rows, from where the cursor stood, and the cursor waits in the first of them: it stays there when the
    terminal is resized, and on a terminal of one page nothing above is touched. In the background nothing is drawn, and Ctrl-Z
    takes the frame off the screen until the job is in the foreground again.
    was_seen: whether there was a frame; has_keys: whether any are read; clock, sleep: in seconds.
    """

    def __init__(
        self,
        console: Console,
        keyboard: Keyboard | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = signals.sleep,
    ) -> None:
        self.console, self._keyboard = console, keyboard or Keyboard()
        self.clock, self.sleep = clock, sleep
        self._page = ExitStack()
        self.pen = Pen(console)
        self._size: ConsoleDimensions | None = None  # of the last frame, while there is one
        self._n_rows = 0
        self.was_seen = False

    @property
    def has_keys(self) -> bool:
        return self._keyboard.is_open

    @property
    def is_stale(self) -> bool:
        """Whether the terminal wants a frame of its own accord: it has another size, or is ours again."""
        return self._size != self.console.size if self._size else self.was_seen and in_foreground(self.console.file)

    @contextmanager
    def shown(self, last: Callable[[], str]) -> Iterator[None]:
        """Around what draws; at the end a text stands where the frame was, on the terminal's first page."""
        with signals.noting_stops():
            self._keyboard.open()
            try:
                yield
            finally:
                self._clear()
                self._write(last())

    def wishes(self) -> list[str]:
        """What the keys that were pressed since the last time ask for, as in `WISHES`."""
        return [WISHES[key] for key in self._keyboard.pressed() if key in WISHES]

    def draw(self, rows: Callable[[ConsoleDimensions], list[Row]]) -> None:
        """What `rows` gives for the terminal's size; none wider, and fewer than it has."""
        if signals.stop_asked:
            self._clear()
            signals.stop()
        if in_foreground(self.console.file):
            self._keyboard.open()
            size = self.console.size
            self._show([self.pen.codes(row) for row in rows(size)], size)
            self.was_seen = True

    def _show(self, rows: list[str], size: ConsoleDimensions) -> None:
        if not self._size:
            with ExitStack() as opening:
                opening.enter_context(signals.at_sudden_end(self._leave_at_once, do=lambda: self._write(ENTER)))
                opening.callback(self._write, LEAVE)
                self._page = opening.pop_all()
        frame = [BEGIN_FRAME]
        if self._size and size.height < self._size.height:  # some terminals move up what they show, and not the cursor
            frame.append(f"\x1b[{self._size.height - size.height}A")
        if size != self._size or len(rows) != self._n_rows:
            frame.append(ERASE)
        self._size, self._n_rows = size, len(rows)
        frame += ["\r", "\r\n".join(rows), f"\x1b[{len(rows) - 1}A\r" if len(rows) > 1 else "\r", END_FRAME]
        self._write("".join(frame))

    def _clear(self) -> None:
        self._size = None
        try:
            self._page.close()
        finally:
            self._keyboard.close()

    def _leave_at_once(self) -> None:
        os.write(self.console.file.fileno(), LEAVE.encode())

    def _write(self, codes: str) -> None:
        self.console.file.write(codes)
        self.console.file.flush()


def obstacle(console: Console) -> str:
    """Why the console cannot hold a window; "" where it can."""
    if not (console.is_terminal and console.file.isatty()):
        return "the output is no terminal"
    if console.is_dumb_terminal or console.legacy_windows:
        return "this terminal cannot move its cursor"
    if console.height < MIN_ROWS or console.width < MIN_WIDTH:
        return f"a panel takes {MIN_WIDTH} columns and {MIN_ROWS} rows; the terminal has {console.width} and {console.height}"
    return ""


def laid_out(items: Row, width: int) -> list[Row]:
    """Items side by side, in as many rows as they need."""
    rows: list[Row] = [[]]
    for text, kind in items:
        if rows[-1] and width_of(rows[-1]) + 3 + cells(text) > width:
            rows.append([])
        rows[-1] += [*([("   ", "plain")] if rows[-1] else []), (text, kind)]
    return rows


def fitting(forms: Sequence[Row], width: int, n: int) -> list[Row]:
    """The first of these items, `laid_out`, that n rows of that width hold; else what they hold of the last."""
    laid = [laid_out(form, width) for form in forms]
    return next((rows for rows in laid if len(rows) <= n and all(width_of(row) <= width for row in rows)), laid[-1][:n])
