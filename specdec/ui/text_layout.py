"""A text that grows at its end, in rows of cells: what stands never moves. Knows no terminals and no models."""

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable

from rich.cells import get_character_cell_size

from specdec.engine.decoding import Step
from specdec.ui.output import Printable

Run = tuple[str, str]  # a stretch of text, and what it is
Row = list[Run]
Tell = Callable[[str, str], None]

MOST_HELD = 12  # cells at a row's end that an unfinished word does not enter: it might not fit
KEPT_ROWS = 60  # of a window on a story
LONGEST_RUN = 256  # characters: strings that grow are copied
_PARTS = re.compile(r"\s|\S+")
_IN_WORDS = {"Lu", "Ll", "Lt", "Lm", "Mn", "Mc", "Nd"}  # not "Lo": scripts that may put no spaces between words


def is_of_a_word(character: str) -> bool:
    return character in "'\u2019" or unicodedata.category(character) in _IN_WORDS


def cells(text: str) -> int:
    """The columns that a text takes in a terminal: those of its characters, so that a text has as many as its parts."""
    return len(text) if text.isascii() else sum(map(get_character_cell_size, text))


def word_at_start(text: str) -> str:
    """What at the start of a text may go on with a word."""
    return text[: next((i for i, c in enumerate(text) if not is_of_a_word(c)), len(text))]


def word_at_end(text: str) -> str:
    """The word at the end of a text that may go on."""
    return word_at_start(text[::-1])[::-1]


def width_of(row: Row) -> int:
    return sum([cells(text) for text, _ in row])


def append(row: Row, text: str, kind: str) -> None:
    """To the last run of the row, if it is of that kind."""
    if row and row[-1][1] == kind and len(row[-1][0]) < LONGEST_RUN:
        text = row.pop()[0] + text
    row.append((text, kind))


def cut(text: str, width: int, mark: str) -> str:
    """As much of a text's start as fits; the mark stands for the rest, where there is room for it."""
    if cells(text) <= max(width, 0):
        return text
    n, room = 0, width - cells(mark)
    while room >= cells(text[n]):
        room -= cells(text[n])
        n += 1
    return text[:n] + mark if room >= 0 else ""


def longest(forms: Iterable[str], width: int) -> str:
    """The first of these forms, the longest one first, that fits; nothing where none does."""
    return next((form for form in forms if cells(form) <= width), "")


def last_cells(row: Row, width: int, mark: str) -> Row:
    """As much of a row's end as fits; the mark stands for the rest."""
    if width_of(row) <= width:
        return row
    short: Row = []
    room = width - cells(mark)
    for text, kind in reversed(row):
        end = cut(text[::-1], room, "")[::-1]
        short.insert(0, (end, kind))
        room -= cells(end)
        if end != text:
            break
    return [(mark, "faint"), *short]


class Rows:
    """A text broken into rows of at most `width` cells, between words where it can be.

    What has a place stays there: an unfinished word that might not fit waits, and one that outgrows its row is broken.
    keep: how many rows are kept, None for all; tell: is told what gets its place, and each line break.
    """

    def __init__(self, width: int, keep: int | None = None, tell: Tell = lambda *_: None) -> None:
        self._tell = tell
        self._width, self._safe = width, width - min(MOST_HELD, width // 4)
        self._rows: deque[Row] = deque([[]], maxlen=keep)
        self._column = 0
        self._goes_on = False  # whether the last word has its place
        self._held: Row = []

    def add(self, text: str, kind: str) -> None:
        for part in _PARTS.findall(text.replace("\t", "    ")):
            if part.isspace():
                self.settle()
                self._goes_on = False
                if part == "\n":
                    self._new_row()
                elif self._column < self._width:
                    self._place(" ", kind)
            elif self._goes_on:
                self._place(part, kind)
            else:
                append(self._held, part, kind)
                if not self._safe < self._column + width_of(self._held) <= self._width:
                    self.settle()

    def so_far(self) -> list[Row]:
        """Without the word that waits."""
        return list(self._rows)

    def settle(self) -> None:
        """The word that waits gets its place, though it may go on: if it outgrows its row, it is broken there."""
        if not self._held:
            return
        if self._column and self._column + width_of(self._held) > self._width:
            self._new_row()
        for text, kind in self._held:
            self._place(text, kind)
        self._held, self._goes_on = [], True

    def _place(self, text: str, kind: str) -> None:
        for part in [text] if self._column + cells(text) <= self._width else text:
            width = cells(part)
            if self._column and self._column + width > self._width:
                self._new_row()
            append(self._rows[-1], part, kind)
            self._tell(part, kind)
            self._column += width

    def _new_row(self) -> None:
        self._rows.append([])
        self._tell("\n", "plain")
        self._column = 0


class Story:
    """A text that grows at its end, in colours of whole words: a word is of its first piece's kind, and a prompt ends one.

    tell: see `Rows`, of its `tail`.
    """

    def __init__(self, tell: Tell = lambda *_: None) -> None:
        self._tell = tell
        self._printable = Printable()
        self._runs: Row = []
        self._in_word = False
        self._width = 0
        self._tail: Rows | None = None

    def go_on(self, step: Step) -> None:
        self.add("".join(step.pieces[: step.n_accepted]), "accepted")
        self.add("".join(step.pieces[step.n_accepted :]), "target")

    def end(self) -> None:
        """What is left of a control sequence."""
        self._add(self._printable.end(), "target")

    def add(self, text: str, kind: str) -> None:
        self._add(self._printable.push(text), kind)

    def _add(self, text: str, kind: str) -> None:
        if not text:
            return
        rest = word_at_start(text) if self._in_word else ""
        if rest:
            self._append(rest, self._runs[-1][1])
        if len(rest) < len(text):
            self._append(text[len(rest) :], kind)
        self._in_word = kind != "prompt" and is_of_a_word(text[-1])

    def tail(self, width: int, n: int, is_whole: bool = False) -> list[Row]:
        """The last n rows so far; is_whole: to the last letter."""
        if not self._tail or width != self._width:
            self._width, self._tail = width, self._laid_out(Rows(width, KEPT_ROWS, self._tell))
        if is_whole:
            self._tail.settle()
        return self._tail.so_far()[-n:]

    def rows(self, width: int) -> list[Row]:
        """All of it."""
        rows = self._laid_out(Rows(width))
        rows.settle()
        return rows.so_far()

    def _append(self, text: str, kind: str) -> None:
        append(self._runs, text, kind)
        if self._tail:
            self._tail.add(text, kind)

    def _laid_out(self, rows: Rows) -> Rows:
        for text, kind in self._runs:
            rows.add(text, kind)
        return rows
