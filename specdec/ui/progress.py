"""Status lines and progress bars in one row of the terminal, removed afterwards."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from specdec.events import Event, PrefillProgress, Prompt, Step
from specdec.loaders import resumable_download
from specdec.runtime import code_cache
from specdec.ui.keyboard import Keyboard
from specdec.ui.plain_views import format_time_left, sanitize
from specdec.ui.signals import is_in_foreground, signals
from specdec.ui.text_layout import cell_width, truncate

LOADING, READING, WRITING, TIMING = "loading", "reading", "writing", "timing passes"
MIN_BAR_CELLS, MAX_BAR_CELLS = 6, 24
TICK_INTERVAL_S = 0.2  # of the spinner
UPDATE_INTERVAL_S = 0.1  # of the progress
LOG_INTERVAL_S = 5.0  # of progress lines without a terminal
COMPILE_LOG_DELAY_S = 1.0  # before the first of them about compiling
STATUS_DELAY_S = 0.25  # a shorter task shows no line
SPINNER, ASCII_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


class ProgressBar(NamedTuple):
    """The progress of a task, which can be rendered as one line with a bar.

    Attributes:
        task: Name of the task.
        share: Completed fraction, 0 to 1.
        suffix: Text behind the percentage.
    """

    task: str
    share: float
    suffix: str = ""

    def render(self, width: int, is_utf: bool) -> str:
        """Return the task's name, bar, percentage and suffix as one line of at most `width` cells.

        If the line is too long, the bar shrinks first, then the name is cut.
        """
        full, ellipsis = "━…" if is_utf else "=."
        end = f" {self.share:4.0%}{self.suffix}"
        task = truncate(self.task, width - MIN_BAR_CELLS - 1 - cell_width(end), ellipsis)
        n = min(MAX_BAR_CELLS, width - cell_width(task) - 1 - cell_width(end))
        return truncate(f"{task} {full * round(n * min(1.0, self.share)):{max(n, 0)}}{end}", width, ellipsis)


Message = str | ProgressBar
ShowMessage = Callable[[Message], None]


class StatusLine:
    """A line on stderr with a spinner and a message, shown while stderr is a terminal and the job is in its foreground.

    A thread animates the spinner, as a sign of life. Without a terminal, a long task logs its progress every few seconds.

    Args:
        message: First message.
        after: Delay before the line appears, in seconds.
    """

    def __init__(self, message: Message, after: float) -> None:
        """Create a line that appears after `after` seconds."""
        self._message, self._compile_message = message, ""
        self._visible_from = time.monotonic() + after
        self._is_terminal = sys.stderr.isatty()
        self._is_animated = self._is_terminal and os.environ.get("TERM") != "dumb"  # it may print each frame as a new row
        self._is_utf = (sys.stderr.encoding or "").lower().startswith("utf")
        self._spinner = SPINNER if self._is_utf else ASCII_SPINNER
        self._n_ticks = self._width = 0
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._next_log_time = time.monotonic() + LOG_INTERVAL_S
        self._next_compile_log = 0.0  # none is compiled yet
        self._download, self._n_bytes_at_begin, self._begin, self._last_update = ("", 0), 0, 0.0, 0.0

    def start(self) -> None:
        """Show the first message and, on a terminal, start the thread that animates the spinner."""
        self.show(self._message)
        if self._is_animated:
            with suppress(RuntimeError):  # no thread is available: the spinner stands still
                threading.Thread(target=self._animate, daemon=True).start()

    def show(self, message: Message) -> None:
        """Replace the message of the status line; without a terminal, log a progress bar at most every LOG_INTERVAL_S."""
        with self._lock:
            self._message = message
            self._draw()
            if not self._is_terminal and isinstance(message, ProgressBar) and time.monotonic() > self._next_log_time:
                self._next_log_time = time.monotonic() + LOG_INTERVAL_S
                self._log(f"{message.task}:{message.share:4.0%}{message.suffix}")

    def _log(self, text: str) -> None:
        """Print a line of progress to stderr, without a terminal."""
        with suppress(OSError, ValueError):
            print(f"specdec: {text}", file=sys.stderr, flush=True)

    def on_compiling(self, name: str, n: int, total: int) -> None:
        """Show how many functions are compiled, in place of the message, and why. See `code_cache.compile_reporters`.

        Without a terminal, log this after COMPILE_LOG_DELAY_S, then at most every LOG_INTERVAL_S.

        Args:
            name: Name of the function that is being compiled; "" shows the message again.
            n: Number of compilations begun so far.
            total: Expected number of compilations.
        """
        text = f"compiling kernels: {n} of about {total} ({code_cache.get_compile_reason(name)})" if name else ""
        with self._lock:
            self._compile_message = text
            self._draw()
            now = time.monotonic()
            if text and not self._next_compile_log:
                self._next_compile_log = now + COMPILE_LOG_DELAY_S
            elif text and now > self._next_compile_log and not self._is_terminal:
                self._next_compile_log = now + LOG_INTERVAL_S
                self._log(text)

    def on_download(self, name: str, n: int, total: int) -> None:
        """Show the progress of a download as a bar with the time left. See `resumable_download.progress_callbacks`.

        Args:
            name: Name of the file.
            n: Bytes downloaded so far.
            total: Bytes of the file, 0 if unknown.
        """
        now = time.monotonic()
        if self._download != (name, total):
            self._download, self._n_bytes_at_begin, self._begin = (name, total), n, now
        elif now > self._last_update + UPDATE_INTERVAL_S:
            self._last_update = now
            left = format_time_left(now - self._begin, (n - self._n_bytes_at_begin) / max(total - self._n_bytes_at_begin, 1))
            of = f" of {total / 1e6:,.0f} MB{left}" if total else f", {n / 1e6:,.0f} MB"
            self.show(ProgressBar(f"downloading {name}", n / total if total else 0.0, of))

    def stop(self) -> None:
        """Erase the status line for good, along with the ^C that the terminal may have echoed."""
        with self._lock:  # else the loading thread could show another message before the process ends
            if not self._ended.is_set():
                self._ended.set()
                self._write(" " * min(self._width + len("^C"), self._max_width))

    @property
    def _max_width(self) -> int:
        try:
            return max((os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1, 1)
        except OSError:
            return 79

    def _animate(self) -> None:
        while not self._ended.wait(TICK_INTERVAL_S):
            with self._lock:
                self._n_ticks += 1
                self._draw()

    def _draw(self) -> None:
        message, width = self._compile_message or self._message, self._max_width - 2
        if self._ended.is_set() or not message or time.monotonic() < self._visible_from:
            return
        text = message.render(width, self._is_utf) if isinstance(message, ProgressBar) else message
        text = truncate(sanitize(text).replace("\n", " ").replace("\t", " "), width, "…" if self._is_utf else ".")
        row = truncate(f"{self._spinner[self._n_ticks % len(self._spinner)]} {text}", self._max_width, "")
        # the first row covers what was typed before the echo was muted
        covered = min(self._width, self._max_width) if self._width else self._max_width
        self._write(row + " " * (covered - cell_width(row)))
        self._width = max(self._width, cell_width(row))

    def _write(self, row: str) -> None:
        if self._is_terminal and is_in_foreground(sys.stderr):
            with suppress(OSError):  # the terminal has closed
                os.write(sys.stderr.fileno(), f"\r{row}\r".encode(sys.stderr.encoding or "ascii", errors="replace"))


@contextmanager
def show_status(message: Message = LOADING, after: float = 0.0) -> Iterator[ShowMessage]:
    """Show a status line on stderr within the context, and yield a function that replaces the line's message.

    The line also shows compilations and downloads that happen within the context. What is typed meanwhile is not echoed, since
    it would smear over the line; the next read of stdin gets it.

    Args:
        message: First message.
        after: Delay before the line appears, in seconds.

    Raises:
        ValueError: An OSError was raised within the context; it is converted, so that it is not taken for an output error.
    """
    line = StatusLine(message, after)
    with Keyboard().mute_echo(), signals.undo_on_exit(line.stop, do=line.start):
        code_cache.compile_reporters.append(line.on_compiling)
        resumable_download.progress_callbacks.append(line.on_download)
        try:
            yield line.show
        except OSError as error:
            raise ValueError(f"cannot load: {error.filename or 'a file'}: {error.strerror or error}") from None
        finally:
            code_cache.compile_reporters.remove(line.on_compiling)
            resumable_download.progress_callbacks.remove(line.on_download)


def make_progress_callback(show: ShowMessage, task: str) -> Callable[[float], None]:
    """Return a callback that takes a completed fraction and shows it as a bar with the time left.

    The callback updates the bar at most every UPDATE_INTERVAL_S.

    Args:
        show: Shows a message, such as the function that `show_status` yields.
        task: Name of the task.
    """
    begin, last = time.monotonic(), 0.0

    def on_progress(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + UPDATE_INTERVAL_S:
            last = now
            show(ProgressBar(task, share, format_time_left(now - begin, share)))

    return on_progress


def show_prefill_progress(
    events: Iterator[Event | PrefillProgress], n_hidden_tokens: int = 0
) -> Generator[Event | PrefillProgress]:
    """Yield the given decoding events unchanged, and show a status line on stderr during a long prefill.

    Args:
        events: The decoding events.
        n_hidden_tokens: Limit of new tokens if the caller does not show them as they come; the status line then also shows the
            progress of the generation. 0 if the caller shows them.
    """
    with ExitStack() as stack:
        show, n, is_shown = stack.enter_context(show_status(READING, STATUS_DELAY_S)), 0, True
        on_reading = on_writing = make_progress_callback(show, READING)
        for event in events:
            if isinstance(event, PrefillProgress):
                if not (is_shown and event.fraction):  # another prefill
                    show = show if is_shown else stack.enter_context(show_status(READING, STATUS_DELAY_S))
                    on_reading, is_shown = make_progress_callback(show, READING), True
                on_reading(event.fraction)
            elif not n_hidden_tokens:
                stack.close()
                is_shown = False
            elif isinstance(event, Step):
                n += len(event.tokens)
                on_writing(n / n_hidden_tokens)
            elif isinstance(event, Prompt):
                on_writing = make_progress_callback(show, WRITING)
            yield event
