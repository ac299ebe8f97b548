"""Keys that are pressed while a text is written. Knows no views and no models."""

import os
import re
import select
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import IO, Any

try:
    import termios
except ImportError:  # Windows, where there are no keys
    termios = None  # type: ignore[assignment]

from specdec.ui.signals import in_foreground, signals

MOST_BYTES = 1024  # of one look at what was typed
# what the keys of a window ask for, and how a window says so
WISHES = {
    b" ": "pause", b"\x1b[C": "step", b"\x1bOC": "step", b"+": "faster", b"=": "faster", b"-": "slower", b"?": "explain",
    b"q": "end", b"Q": "end",
}  # fmt: skip
_KEYS = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[^\x1b]")
_UNFINISHED = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")


class Keyboard:
    """The terminal on stdin, which between `open` and `close` shows nothing of what is typed and keeps nothing for the shell.

    Where stdin is something else it is left alone, and there are no keys.
    """

    def __init__(self, stdin: IO[str] | None = None) -> None:
        self._stdin = stdin or sys.stdin
        self._is_terminal = bool(termios and self._stdin and self._stdin.isatty())
        self._opened = ExitStack()
        self.is_open = False
        self._rest = b""

    def open(self) -> None:
        """Where it is not yet; the job must be in the foreground, or it would be stopped."""
        if self.is_open or not self._is_terminal or not in_foreground(self._stdin):
            return
        # a ^C would push the panel down
        self._opened.enter_context(self._without(termios.ICANON | termios.ECHO | termios.ECHOCTL, is_forgetful=True))
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self._opened.close()

    def pressed(self) -> list[bytes]:
        """What the keys sent since the last time, a key an entry; in the background none is heard."""
        if not self.is_open or not in_foreground(self._stdin) or not select.select([self._stdin], [], [], 0)[0]:
            return []
        typed = self._rest + os.read(self._stdin.fileno(), MOST_BYTES)
        unfinished = _UNFINISHED.search(typed)
        self._rest = unfinished[0] if unfinished else b""
        return _KEYS.findall(typed[: len(typed) - len(self._rest)])

    def unheard(self) -> AbstractContextManager[None]:
        """Within, what is typed is not shown; it waits for whoever reads the next line."""
        if not self._is_terminal or not in_foreground(self._stdin):
            return nullcontext()
        return self._without(termios.ECHO | termios.ECHOCTL, is_forgetful=False)

    def as_it_was(self) -> AbstractContextManager[None]:
        """Within, a sudden end leaves the terminal as it is now, whatever else has changed its modes."""
        if not self._is_terminal:
            return nullcontext()
        return signals.at_sudden_end(partial(self._set, termios.tcgetattr(self._stdin), is_forgetful=False))

    def _without(self, flags: int, is_forgetful: bool) -> AbstractContextManager[None]:
        """Within, the terminal has none of these modes. is_forgetful: about what was typed, whenever they change."""
        before = termios.tcgetattr(self._stdin)
        modes = [*before[:3], before[3] & ~flags, *before[4:]]
        return signals.undone(partial(self._set, before, is_forgetful), do=partial(self._set, modes, is_forgetful))

    def _set(self, modes: list[Any], is_forgetful: bool) -> None:
        if in_foreground(self._stdin):  # in the background this would stop the job, and the terminal is another's now
            with suppress(termios.error):  # it has gone
                if is_forgetful:
                    termios.tcflush(self._stdin, termios.TCIFLUSH)
                termios.tcsetattr(self._stdin, termios.TCSANOW, modes)
