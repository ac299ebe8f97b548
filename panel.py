"""Events to a live Rich panel. Knows no models."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

from .decoding import Event, Prompt, Proposal, Statistics, Step
from .interrupts import in_foreground, signals
from .output import printable
from .tokenizer import AnyTokenizer, TextStream

STYLES = {"prompt": "bold", "target": "", "accepted": "green", "rejected": "strike red", "proposed": "yellow"}
# without colour, the words have to differ in something else
STYLES_NO_COLOR = {"prompt": "bold", "target": "", "accepted": "underline", "rejected": "strike", "proposed": "italic"}
REJECTED_SECONDS = 1.5  # how long a rejected token stays in sight
REFRESH_SECONDS = 0.1, 0.5  # between frames, at the least and at the most
RENDER_SHARE = 0.03  # of the time that frames may take: where one is slow, there are fewer
LONGEST_HOLD_SECONDS = 3600.0  # at a pace
SIDE_WIDTH = 24
BAR_WIDTH = 16
MAX_TEXT_ROWS = 14
SHOW_CURSOR = b"\n\x1b[?25h"
MIN_ROWS = 8  # of a terminal: two of text, one line of figures, the progress, the frame, and the line of the cursor


class Piece(NamedTuple):
    """A stretch of text, what it is (a key of STYLES), and when it came."""

    text: str
    kind: str
    seconds: float


@contextmanager
def no_echo_of_control_keys() -> Iterator[None]:
    """Ctrl-C shows no ^C, which would push the panel one row down; where there is no such terminal, nothing happens."""
    if termios is None or not (sys.stdin and sys.stdin.isatty()):
        yield
        return
    keyboard = sys.stdin
    before = termios.tcgetattr(keyboard)
    quiet = [*before]
    quiet[3] &= ~termios.ECHOCTL

    def set_modes(modes: list[Any]) -> None:
        if in_foreground(keyboard):  # in the background this would stop the job, and the terminal is another's now
            with suppress(termios.error):  # it has gone
                termios.tcsetattr(keyboard, termios.TCSANOW, modes)

    with signals.at_sudden_end(lambda: set_modes(before), do=lambda: set_modes(quiet)):
        try:
            yield
        finally:
            set_modes(before)


class LivePanel:
    """The story's tail with proposals, accepted and rejected tokens, and the running figures beside it.

    Rendering is a pure function of the events that it was shown; frames come when due, from this thread.
    pace: steps a second at most, each shown proposed and then judged; 0 is full speed. In the background nothing is drawn, and
    Ctrl-Z takes the panel off the screen until the job is in the foreground again.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        console: Console,
        statistics: Statistics,
        max_tokens: int,
        gamma: int,
        title: str,
        pace: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = signals.sleep,
    ) -> None:
        self._stream, self._console, self._statistics = TextStream(tokenizer), console, statistics
        self._max_tokens, self._gamma, self._title, self._clock = max_tokens, gamma, title, clock
        frames_a_step = 2 if gamma else 1
        self._sleep, self._hold_seconds = sleep, min(1 / frames_a_step / pace, LONGEST_HOLD_SECONDS) if pace else 0.0
        self._styles = STYLES_NO_COLOR if console.no_color else STYLES
        self._story: list[Piece] = []
        self._recent: deque[Piece] = deque()
        self._recent_length = 0
        self._proposed: list[Piece] = []
        self._next_frame = 0.0
        self._live: Live | None = None  # while it is on the screen
        self._screen, self._stops = ExitStack(), ExitStack()

    @staticmethod
    def fits(console: Console) -> bool:
        """Whether the console is a terminal that can hold the panel."""
        return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal and console.height >= MIN_ROWS

    def __enter__(self) -> "LivePanel":
        self._stops.enter_context(signals.noting_stops())
        self._appear()
        return self

    def __exit__(self, *_: Any) -> None:
        with self._stops:
            self._disappear()
            self._add(self._stream.end(), "target")
            self._console.print(self._styled(self._story))

    def _appear(self) -> None:
        if not in_foreground(self._console.file):
            return
        with ExitStack() as screen:
            screen.enter_context(no_echo_of_control_keys())
            live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
            terminal = self._console.file
            screen.enter_context(signals.at_sudden_end(lambda: os.write(terminal.fileno(), SHOW_CURSOR), do=live.start))
            screen.callback(live.stop)
            self._live = live
            self._screen = screen.pop_all()

    def _disappear(self) -> None:
        self._live = None
        self._screen.close()

    def show(self, event: Event) -> None:
        if isinstance(event, Prompt):
            for token in event.tokens:
                self._add(self._stream.push(token), "prompt")
            self._frame()
        elif isinstance(event, Proposal):
            self._show_proposal(event.tokens)
        else:
            self._show_step(event)

    def _show_proposal(self, tokens: list[int]) -> None:
        now = self._clock()
        if self._is_due(now):
            self._proposed = [Piece(printable(text), "proposed", now) for text in self._stream.peek(tokens)]
            self._frame()
            self._proposed = []

    def _show_step(self, step: Step) -> None:
        for token in step.tokens[: step.n_accepted]:
            self._add(self._stream.push(token), "accepted")
        for text in self._stream.peek(step.draft_tokens[step.n_accepted :]):
            self._add(text, "rejected")
        for token in step.tokens[step.n_accepted :]:
            self._add(self._stream.push(token), "target")
        if self._is_due(self._clock()):
            self._frame()

    def _is_due(self, now: float) -> bool:
        return now >= self._next_frame or bool(self._hold_seconds) or signals.stop_asked

    def _add(self, text: str, kind: str) -> None:
        piece = Piece(printable(text), kind, self._clock())
        if kind != "rejected":
            self._story.append(piece)
        self._recent.append(piece)
        self._recent_length += len(piece.text)
        while self._recent_length - len(self._recent[0].text) > 2 * MAX_TEXT_ROWS * self._console.width:
            self._recent_length -= len(self._recent.popleft().text)

    def _frame(self) -> None:
        begin = self._clock()
        self._draw()
        end = self._clock()
        shortest, longest = REFRESH_SECONDS
        self._next_frame = end + min(max(shortest, (end - begin) / RENDER_SHARE), longest)
        if self._hold_seconds:
            self._sleep(max(0.0, self._hold_seconds - (end - begin)))
            if signals.stop_asked:
                self._draw()

    def _draw(self) -> None:
        if signals.stop_asked:
            self._disappear()
            signals.stop()
        if not self._live:
            self._appear()
        if self._live:
            self._live.update(self, refresh=True)

    def _styled(self, pieces: list[Piece]) -> Text:
        """One Text; neighbours of one kind become one span."""
        text = Text()
        run: list[str] = []
        kind = ""
        for piece in pieces:
            if piece.kind != kind and run:
                text.append("".join(run), self._styles[kind])
                run = []
            run.append(piece.text)
            kind = piece.kind
        if run:
            text.append("".join(run), self._styles[kind])
        return text

    def __rich__(self) -> RenderableType:
        width, height = self._console.width, self._console.height
        is_wide = width >= 64
        inner = width - 4
        text_rows = max(2, min(MAX_TEXT_ROWS, height - (4 if is_wide else 5)))
        tail = self._tail(inner - SIDE_WIDTH - 3 if is_wide else inner, text_rows)
        body: RenderableType
        if is_wide:
            columns = Table.grid(padding=(0, 3, 0, 0), expand=True)
            columns.add_column(ratio=1)
            columns.add_column(width=SIDE_WIDTH)
            columns.add_row(tail, self._figures(text_rows))
            body = columns
        else:
            body = Group(tail, self._figures_in_a_line())
        return Panel(
            Group(body, self._progress(inner)),
            title=Text(self._title, "bold"),
            subtitle=self._legend() if width >= 50 else None,
            box=box.ROUNDED,
            padding=(0, 1),
        )

    def _tail(self, width: int, rows: int) -> Text:
        """The last rows of the text, proposals included, wrapped."""
        oldest = self._clock() - REJECTED_SECONDS
        pieces = [p for p in self._recent if p.kind != "rejected" or p.seconds >= oldest] + self._proposed
        lines = self._styled(pieces).wrap(self._console, max(8, width))
        tail = Text("\n").join(lines[-rows:])
        tail.append("\n" * (rows - len(lines)))
        return tail

    def _figures(self, rows: int) -> RenderableType:
        figures = Table.grid(expand=True)
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right", no_wrap=True)
        s = self._statistics
        figures.add_row("tok/s", Text(f"{s.tokens_per_second:.0f}", "bold"))
        if not self._gamma:
            return figures
        figures.add_row("accepted", f"{s.acceptance_rate:.0%}")
        figures.add_row("tokens per pass", f"{s.tokens_per_pass:.2f}")
        bins = self._bins()
        if len(bins) + 4 > rows:
            figures.add_row("by length", self._sparkline())
            return figures
        shares = [(label, count / max(1, s.target_passes)) for label, count in bins]
        bars = [f"{label:<2} {self._bar(share):<{BAR_WIDTH}} {share:4.0%}" for label, share in shares]
        gap = "\n" * (len(bins) + 5 <= rows)
        return Group(figures, Text(gap + "accepted in a pass\n" + "\n".join(bars), "dim"))

    def _figures_in_a_line(self) -> Text:
        s = self._statistics
        line = Text(f"{s.tokens_per_second:.0f} tok/s", "bold", no_wrap=True, overflow="crop")
        if self._gamma:
            line.append(f" {s.acceptance_rate:.0%} {s.tokens_per_pass:.1f}/pass ", "not bold")
            line.append(self._sparkline())
        return line

    def _bins(self) -> list[tuple[str, int]]:
        """Passes by accepted length, the long ones together."""
        histogram = self._statistics.accepted_histogram
        counts = histogram + [0] * (self._gamma + 1 - len(histogram))
        if len(counts) <= 8:
            return [(str(i), n) for i, n in enumerate(counts)]
        return [(str(i), n) for i, n in enumerate(counts[:7])] + [("7+", sum(counts[7:]))]

    def _bar(self, share: float) -> str:
        return ("█" if self._console.encoding.startswith("utf") else "#") * round(share * BAR_WIDTH)

    def _sparkline(self) -> str:
        counts = [count for _, count in self._bins()]
        levels = "▁▂▃▄▅▆▇█" if self._console.encoding.startswith("utf") else ".:-=+*#@"
        return "".join(levels[round(7 * count / max(1, *counts))] for count in counts)

    def _progress(self, width: int) -> Table:
        done = self._statistics.n_generated
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        grid.add_row(ProgressBar(total=max(1, self._max_tokens), completed=done), f"{done}/{self._max_tokens}")
        return grid

    def _legend(self) -> Text:
        kinds = ("proposed", "accepted", "rejected", "target") if self._gamma else ()
        return Text(" ").join(Text(kind, self._styles[kind]) for kind in kinds)
