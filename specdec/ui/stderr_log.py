"""A log on stderr whose reader may stall."""

import os
import queue
import sys
import threading
import time
from contextlib import suppress

from specdec.ui.plain_views import sanitize_line

MAX_LOG_LINES = 1000  # log lines that wait to be written


class StderrLog:
    """A log on stderr written by a thread, so that a reader that stalls blocks nothing; lines that do not fit are dropped."""

    def __init__(self) -> None:
        """Start the thread that writes the lines."""
        self._lines, self._n_dropped = queue.Queue[str](MAX_LOG_LINES), 0
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def write_line(self, line: str) -> None:
        """Queue a log line with the time in front; count it as dropped if the queue is full."""
        try:
            self._lines.put_nowait(f"{time.strftime('%H:%M:%S')} {line}")
        except queue.Full:
            self._n_dropped += 1

    def _write_lines(self) -> None:
        """Write queued lines to stderr forever, without Python's buffers: a blocked write would hold their lock, even at exit."""
        while True:
            lines, n = [self._lines.get()], self._n_dropped
            if n:
                lines.append(f"{n} log lines were dropped, because stderr was not read")
            with suppress(OSError, ValueError):
                for line in lines:
                    os.write(sys.stderr.fileno(), f"specdec: {sanitize_line(line)}\n".encode(errors="backslashreplace"))
            self._n_dropped -= n
