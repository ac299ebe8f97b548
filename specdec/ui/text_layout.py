"""Styled text that grows at its end, wrapped into rows of terminal cells; text that is placed never moves."""

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable

from rich.cells import get_character_cell_size

from specdec.events import Step
from specdec.ui.plain_views import StreamSanitizer

Run = tuple[str, str]  # a stretch of text and its style
Row = list[Run]
OnWrite = Callable[[str, str], None]

MAX_HELD_CELLS = 12  # cells at a row's end that an unfinished word does not enter, since it might not fit
MAX_TAIL_ROWS = 60
MAX_RUN_LENGTH = 256  # characters; growing a string copies it
_PART_PATTERN = re.compile(r"\s|\S+")
_WORD_CATEGORIES = {"Lu", "Ll", "Lt", "Lm", "Mn", "Mc", "Nd"}  # not "Lo": scripts that may put no spaces between words


def is_word_character(character: str) -> bool:
    """Return whether a character can continue a word."""
    return character in "'\u2019" or unicodedata.category(character) in _WORD_CATEGORIES


def cell_width(text: str) -> int:
    """Return the number of terminal columns of a text: the sum over its characters, so that the widths of parts add up."""
    return len(text) if text.isascii() else sum(map(get_character_cell_size, text))


def format_count(n: int) -> str:
    """Return a number as text in thousands, millions or billions, such as "1.5 G" or "135 M", so that a unit may follow."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.1f} {name}" if n < 10 * unit else f"{n / unit:.0f} {name}"
    return f"{n} "


def leading_word(text: str) -> str:
    """Return the word characters that a text starts with, which may continue a word before it; "" if there are none."""
    return text[: next((i for i, c in enumerate(text) if not is_word_character(c)), len(text))]


def trailing_word(text: str) -> str:
    """Return the word characters that a text ends with, which a later text may continue; "" if there are none."""
    return leading_word(text[::-1])[::-1]


def row_width(row: Row) -> int:
    """Return the number of terminal columns of a row of (text, style) runs."""
    return sum([cell_width(text) for text, _ in row])


def append_run(row: Row, text: str, style: str) -> None:
    """Append text to a row in place: to its last run if that has the same style and is short, else as a new run."""
    if row and row[-1][1] == style and len(row[-1][0]) < MAX_RUN_LENGTH:
        text = row.pop()[0] + text
    row.append((text, style))


def truncate(text: str, width: int, mark: str) -> str:
    """Cut a text to at most `width` cells and return it; a text that was cut ends with `mark`, or is "" if that does not fit."""
    if cell_width(text) <= max(width, 0):
        return text
    n, left = 0, width - cell_width(mark)
    while left >= cell_width(text[n]):
        left -= cell_width(text[n])
        n += 1
    return text[:n] + mark if left >= 0 else ""


def first_fitting(forms: Iterable[str], width: int) -> str:
    """Return the first of several wordings, the longest first, that fits into `width` cells; "" if none does."""
    return next((form for form in forms if cell_width(form) <= width), "")


def truncate_left(row: Row, width: int, mark: str) -> Row:
    """Cut a row of runs at its left end to at most `width` cells and return it; a row that was cut starts with `mark`."""
    if row_width(row) <= width:
        return row
    short: Row = []
    left = width - cell_width(mark)
    for text, style in reversed(row):
        end = truncate(text[::-1], left, "")[::-1]
        short.insert(0, (end, style))
        left -= cell_width(end)
        if end != text:
            break
    return [(mark, "faint"), *short]


class WrappedRows:
    """Text wrapped into rows of at most `width` cells, between words where possible.

    Placed text stays in its place: an unfinished word that might not fit waits, and one that outgrows its row is broken.

    Args:
        width: Cells of a row.
        max_rows: Number of rows to keep, None for all.
        on_write: Called with each placed run and each line break.
    """

    def __init__(self, width: int, max_rows: int | None = None, on_write: OnWrite = lambda *_: None) -> None:
        """Start with one empty row."""
        self._on_write = on_write
        self._set_width(width)
        self._rows: deque[Row] = deque([[]], maxlen=max_rows)
        self._column = 0
        self._is_word_placed = False  # whether the last word has begun to be placed
        self._pending_word: Row = []

    def add(self, text: str, style: str) -> None:
        """Append text in a style, and place it, except for an unfinished word near the end of a row, which is held back."""
        for part in _PART_PATTERN.findall(text.replace("\t", "    ")):
            if part.isspace():
                self.flush()
                self._is_word_placed = False
                if part == "\n":
                    self._new_row()
                elif self._column < self._width:
                    self._place(" ", style)
            elif self._is_word_placed:
                self._place(part, style)
            else:
                append_run(self._pending_word, part, style)
                if not self._safe_width < self._column + row_width(self._pending_word) <= self._width:
                    self.flush()

    def resize(self, width: int) -> None:
        """Wrap at another width from the current row on, on a terminal that has wrapped what is longer than this again."""
        self._set_width(width)
        if self._column > width:
            self._column = (self._column - 1) % width + 1

    def _set_width(self, width: int) -> None:
        self._width, self._safe_width = width, width - min(MAX_HELD_CELLS, width // 4)

    def get_rows(self) -> list[Row]:
        """Return the wrapped rows so far, without the unfinished word that is held back."""
        return list(self._rows)

    def flush(self) -> None:
        """Place the unfinished word that is held back, though it may continue; a word that outgrows its row is broken there."""
        if not self._pending_word:
            return
        if self._column and self._column + row_width(self._pending_word) > self._width:
            self._new_row()
        for text, style in self._pending_word:
            self._place(text, style)
        self._pending_word, self._is_word_placed = [], True

    def _place(self, text: str, style: str) -> None:
        for part in [text] if self._column + cell_width(text) <= self._width else text:
            width = cell_width(part)
            if self._column and self._column + width > self._width:
                self._new_row()
            append_run(self._rows[-1], part, style)
            self._on_write(part, style)
            self._column += width

    def _new_row(self) -> None:
        self._rows.append([])
        self._on_write("\n", "plain")
        self._column = 0


class StyledText:
    """A text that grows at its end, in which a word has the style of its first piece; the end of a prompt always ends a word.

    Args:
        on_write: As in `WrappedRows`, for the rows of `tail`.
    """

    def __init__(self, on_write: OnWrite = lambda *_: None) -> None:
        """Start with an empty text."""
        self._on_write = on_write
        self._sanitizer = StreamSanitizer()
        self._runs: Row = []
        self._is_in_word = False
        self._width = 0
        self._tail: WrappedRows | None = None

    def add_step(self, step: Step) -> None:
        """Append the text of a verified step: its accepted draft tokens and the target's own tokens, each in their style."""
        self.add("".join(step.pieces[: step.n_accepted]), "accepted")
        self.add("".join(step.pieces[step.n_accepted :]), "target")

    def start_row(self) -> None:
        """Append a line break, unless the text is empty or ends with one."""
        if self._runs and not self._runs[-1][0].endswith("\n"):
            self.add("\n", "plain")

    def copy(self) -> "StyledText":
        """Return a new text with the same runs so far, without the `on_write` callback."""
        other = StyledText()
        for text, style in self._runs:
            other.add(text, style)
        return other

    def finish(self) -> None:
        """Append the text that was held back as the start of a control sequence that never ended."""
        self._add(self._sanitizer.end(), "target")

    def add(self, text: str, style: str) -> None:
        """Append text in a style, without control characters; the rest of a word that has begun keeps the word's style."""
        self._add(self._sanitizer.push(text), style)

    def _add(self, text: str, style: str) -> None:
        if not text:
            return
        rest = leading_word(text) if self._is_in_word else ""
        if rest:
            self._append(rest, self._runs[-1][1])
        if len(rest) < len(text):
            self._append(text[len(rest) :], style)
        self._is_in_word = style != "prompt" and is_word_character(text[-1])

    def tail(self, width: int, n: int, is_whole: bool = False) -> list[Row]:
        """Return the last n rows of the text wrapped at `width` cells, at most MAX_TAIL_ROWS.

        Newly placed text is reported to `on_write`; at another width than before, that is all of the text.

        Args:
            width: Cells of a row.
            n: Number of rows.
            is_whole: Whether to place an unfinished last word too, which is otherwise held back.
        """
        if not self._tail or width != self._width:
            self._width, self._tail = width, self._wrap_into(WrappedRows(width, MAX_TAIL_ROWS, self._on_write))
        if is_whole:
            self._tail.flush()
        return self._tail.get_rows()[-n:]

    def resize(self, width: int) -> None:
        """Continue the current row of `tail` at another width; nothing is reported to `on_write` again."""
        if self._tail:
            self._width = width
            self._tail.resize(width)

    def wrap(self, width: int) -> list[Row]:
        """Return the whole text wrapped into rows of at most `width` cells."""
        rows = self._wrap_into(WrappedRows(width))
        rows.flush()
        return rows.get_rows()

    def _append(self, text: str, style: str) -> None:
        append_run(self._runs, text, style)
        if self._tail:
            self._tail.add(text, style)

    def _wrap_into(self, rows: WrappedRows) -> WrappedRows:
        for text, style in self._runs:
            rows.add(text, style)
        return rows
