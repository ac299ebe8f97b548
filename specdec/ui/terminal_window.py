"""A window on a terminal: framed and coloured rows, keys, and Ctrl-Z."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console, ConsoleDimensions

from specdec.ui.keyboard import KEY_ACTIONS, Keyboard
from specdec.ui.signals import is_in_foreground, signals
from specdec.ui.text_layout import Row, cell_width, row_width, truncate

# SGR codes (select graphic rendition) of the styles of runs.
STYLES = {
    "prompt": "1", "target": "", "accepted": "32", "rejected": "9;31", "unread": "2;9", "proposed": "35",
    "strong": "1", "plain": "", "faint": "2", "edge": "2",
}  # fmt: skip
# Without colours, styles differ in other attributes.
STYLES_NO_COLOR = STYLES | {"accepted": "4", "rejected": "9", "proposed": "3"}
# The alternate screen without a cursor; long rows are cut, not wrapped.
ENTER_PAGE = "\x1b[?1049h\x1b[?25l\x1b[?7l"
ERASE_BELOW = "\r\x1b[J"
LEAVE_PAGE = f"\x1b[?2026l{ERASE_BELOW}\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # synchronized update: drawn at once
MIN_ROWS, MIN_WIDTH = 8, 20  # of a terminal that can hold a frame
MAX_FRAME_WIDTH = 100  # cells: longer lines are hard to read


class FramePainter:
    """A painter that builds the rows of a frame for a console and converts rows to terminal codes."""

    def __init__(self, console: Console) -> None:
        """Choose characters and styles for the console."""
        self.is_utf = console.encoding.startswith("utf")
        self.ellipsis = "…" if self.is_utf else "..."
        self._styles = STYLES_NO_COLOR if console.no_color else STYLES

    def rule(self, width: int, corners: str, left: str, right: str) -> Row:
        """Return a horizontal line of the frame with a text near each end; the left one is cut to fit.

        Args:
            width: Cells of the line.
            corners: Left corner, line and right corner, such as "╭─╮".
            left: Text near the left end, "" for none.
            right: Text near the right end, "" for none.
        """
        if not self.is_utf:
            corners = "+-+"
        left = truncate(left, width - 6 - (cell_width(right) + 4 if right else 0), self.ellipsis)
        fill = width - 4 - sum(cell_width(text) + 2 for text in (left, right) if text)
        words = [[(f" {text} ", "strong")] if text else [] for text in (left, right)]
        left_end, line, stub, right_end = [(text, "edge") for text in (corners[:2], corners[1] * fill, corners[1], corners[2])]
        return [left_end, *words[0], line, *words[1], stub, right_end]

    def progress_bar(self, width: int, share: float) -> Row:
        """Return a horizontal line of the frame that is filled up to `share` (0 to 1), as a progress bar."""
        left, full, empty, right = "├━─┤" if self.is_utf else "+=-+"
        n = round((width - 2) * min(1.0, share))
        return [(left, "edge"), (full * n, "plain"), (empty * (width - 2 - n), "edge"), (right, "edge")]

    def frame_row(self, row: Row, inner: int) -> Row:
        """Return a row of at most `inner` cells, padded to that width, between the sides of the frame."""
        side = "│" if self.is_utf else "|"
        return [(side + " ", "edge"), *row, (" " * (inner - row_width(row) + 1), "plain"), (side, "edge")]

    def style_row(self, row: Row) -> str:
        """Return a row's text as a string with the terminal codes of its styles."""
        codes = [self._styles[style] for _, style in row]
        return "".join([f"\x1b[{code}m{text}\x1b[m" if code else text for (text, _), code in zip(row, codes, strict=True)])

    def encode_row(self, row: Row) -> str:
        """Return the terminal codes that draw a row over an old one.

        Edges are placed by their column, so they are aligned even if the terminal draws a text wider or narrower than expected.
        """
        parts, start = [] if row and row[-1][1] == "edge" else ["\x1b[K"], 0
        for i in range(1, len(row)):
            if row[i][1] == "edge" and row[i - 1][1] != "edge":
                parts += [self.style_row(row[start:i]), f"\x1b[K\x1b[{row_width(row[:i]) + 1}G"]
                start = i
        return "".join([*parts, self.style_row(row[start:])])


class Window:
    """Frames on the terminal's alternate screen, and the keys pressed meanwhile, during a `session`.

    Every frame begins in the row where the cursor stood at first, and the cursor waits in that row. So it stays there when the
    terminal is resized, and nothing above it is touched on a terminal without an alternate screen. In the background nothing is
    drawn, and Ctrl-Z removes the frame until the job is in the foreground again.

    Attributes:
        was_drawn: Whether a frame was drawn.
        has_keys: Whether keys are read.
        clock: Returns seconds.
        sleep: Sleeps for seconds.
    """

    def __init__(
        self,
        console: Console,
        keyboard: Keyboard | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = signals.sleep,
    ) -> None:
        """Store the console and the keyboard; the screen stays until a `session`."""
        self.console, self._keyboard = console, keyboard or Keyboard()
        self.clock, self.sleep = clock, sleep
        self._exit_stack = ExitStack()
        self.painter = FramePainter(console)
        self._size: ConsoleDimensions | None = None  # of the last frame, while there is one
        self._n_rows = 0
        self.was_drawn = False

    @property
    def has_keys(self) -> bool:
        """Whether pressed keys are being read."""
        return self._keyboard.is_open

    @property
    def needs_redraw(self) -> bool:
        """Whether a new frame is needed, since the terminal was resized or the job has returned to the foreground."""
        return self._size != self.console.size if self._size else self.was_drawn and is_in_foreground(self.console.file)

    @contextmanager
    def session(self, get_final_text: Callable[[], str]) -> Iterator[None]:
        """Read keys within the context; on leaving, remove the frame and print the text that `get_final_text` returns."""
        with signals.defer_stops():
            self._keyboard.open()
            try:
                yield
            finally:
                self._clear()
                self._write(get_final_text())

    def read_actions(self) -> list[str]:
        """Return the actions of the keys pressed since the last call, such as "pause"; keys not in `KEY_ACTIONS` are ignored."""
        return [KEY_ACTIONS[key] for key in self._keyboard.read_keys() if key in KEY_ACTIONS]

    def draw(self, rows: Callable[[ConsoleDimensions], list[Row]]) -> None:
        """Draw a frame of the rows that `rows` returns for the terminal's size, unless the job is in the background.

        If Ctrl-Z was pressed, the frame is removed and the process is suspended first.

        Args:
            rows: Returns fewer rows than the terminal has, none of them wider.
        """
        if signals.is_stop_requested:
            self._clear()
            signals.suspend()
        if is_in_foreground(self.console.file):
            self._keyboard.open()
            size = self.console.size
            self._show([self.painter.encode_row(row) for row in rows(size)], size)
            self.was_drawn = True

    def _show(self, rows: list[str], size: ConsoleDimensions) -> None:
        if not self._size:
            with ExitStack() as opening:
                opening.enter_context(signals.undo_on_kill(self._leave_page_now, do=lambda: self._write(ENTER_PAGE)))
                opening.callback(self._write, LEAVE_PAGE)
                self._exit_stack = opening.pop_all()
        frame = [BEGIN_FRAME]
        if self._size and size.height < self._size.height:  # some terminals scroll the text without moving the cursor
            frame.append(f"\x1b[{self._size.height - size.height}A")
        if size != self._size or len(rows) != self._n_rows:
            frame.append(ERASE_BELOW)
        self._size, self._n_rows = size, len(rows)
        frame += ["\r", "\r\n".join(rows), f"\x1b[{len(rows) - 1}A\r" if len(rows) > 1 else "\r", END_FRAME]
        self._write("".join(frame))

    def _clear(self) -> None:
        self._size = None
        try:
            self._exit_stack.close()
        finally:
            self._keyboard.close()

    def _leave_page_now(self) -> None:
        os.write(self.console.file.fileno(), LEAVE_PAGE.encode())

    def _write(self, codes: str) -> None:
        self.console.file.write(codes)
        self.console.file.flush()


def find_obstacle(console: Console) -> str:
    """Return why a console cannot show a `Window`, as a phrase for a message; "" if it can."""
    if not (console.is_terminal and console.file.isatty()):
        return "the output is not a terminal"
    if console.is_dumb_terminal or console.legacy_windows:
        return "this terminal cannot move its cursor"
    if console.height < MIN_ROWS or console.width < MIN_WIDTH:
        return f"a panel takes {MIN_WIDTH} columns and {MIN_ROWS} rows; the terminal has {console.width} and {console.height}"
    return ""


def lay_out(items: Row, width: int) -> list[Row]:
    """Return (text, style) items as rows of at most `width` cells, with as many items next to each other as fit."""
    rows: list[Row] = [[]]
    for text, style in items:
        if rows[-1] and row_width(rows[-1]) + 3 + cell_width(text) > width:
            rows.append([])
        rows[-1] += [*([("   ", "plain")] if rows[-1] else []), (text, style)]
    return rows


def fit_items(forms: Sequence[Row], width: int, n: int) -> list[Row]:
    """Return the rows of the first form that fits n rows of `width` cells; if none does, the first n rows of the last form.

    Args:
        forms: Alternative wordings of the same (text, style) items, the longest first.
        width: Cells of a row.
        n: Maximum number of rows.
    """
    laid = [lay_out(form, width) for form in forms]
    return next((rows for rows in laid if len(rows) <= n and all(row_width(row) <= width for row in rows)), laid[-1][:n])
