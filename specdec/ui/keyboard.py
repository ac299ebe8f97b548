"""Keys pressed during a generation, and the terminal modes that they need."""

import os
import re
import select
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import IO, Any

try:
    import termios
except ImportError:  # Windows; there are no keys
    termios = None  # type: ignore[assignment]

from specdec.ui.signals import is_in_foreground, signals

MAX_READ_BYTES = 1024  # of one poll
# The bytes that a key sends, and its action.
KEY_ACTIONS = {
    b" ": "pause", b"\x1b[C": "step", b"\x1bOC": "step", b"+": "faster", b"=": "faster", b"-": "slower", b"?": "explain",
    b"q": "end", b"Q": "end", b"t": "thought",
}  # fmt: skip
_KEY_PATTERN = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[^\x1b]")
_PARTIAL_KEY = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")


class Keyboard:
    """A reader of the keys pressed at the terminal on stdin, which between `open` and `close` echoes none of them.

    Keys pressed in between are not left to the shell. If stdin is not a terminal it is left alone, and there are no keys.
    """

    def __init__(self, stdin: IO[str] | None = None) -> None:
        """Find out whether stdin is a terminal; its mode stays until `open`."""
        self._stdin = stdin or sys.stdin
        self._is_terminal = bool(termios and self._stdin and self._stdin.isatty())
        self._exit_stack = ExitStack()
        self.is_open = False
        self._partial_key = b""

    def open(self) -> None:
        """Mute the terminal's echo and start to read single keys; do nothing if open already or in the background."""
        if self.is_open or not self._is_terminal or not is_in_foreground(self._stdin):
            return
        # An echoed ^C would push the panel down.
        self._exit_stack.enter_context(self._clear_modes(termios.ICANON | termios.ECHO | termios.ECHOCTL, discards_input=True))
        self.is_open = True

    def close(self) -> None:
        """Stop reading keys, discard unread input and restore the terminal's modes."""
        self.is_open = False
        self._exit_stack.close()

    def read_keys(self) -> list[bytes]:
        """Return the keys pressed since the last call, the bytes of each as one entry; none while closed or in the background."""
        if not self.is_open or not is_in_foreground(self._stdin) or not select.select([self._stdin], [], [], 0)[0]:
            return []
        data = self._partial_key + os.read(self._stdin.fileno(), MAX_READ_BYTES)
        unfinished = _PARTIAL_KEY.search(data)
        self._partial_key = unfinished[0] if unfinished else b""
        return _KEY_PATTERN.findall(data[: len(data) - len(self._partial_key)])

    def mute_echo(self) -> AbstractContextManager[None]:
        """Mute the terminal's echo within the context; what is typed waits for the next read of stdin."""
        if not self._is_terminal or not is_in_foreground(self._stdin):
            return nullcontext()
        return self._clear_modes(termios.ECHO | termios.ECHOCTL, discards_input=False)

    def restore_modes_on_kill(self) -> AbstractContextManager[None]:
        """Restore the terminal's current modes if a signal ends the process within the context."""
        if not self._is_terminal:
            return nullcontext()
        return signals.undo_on_kill(partial(self._set_modes, termios.tcgetattr(self._stdin), discards_input=False))

    def _clear_modes(self, flags: int, discards_input: bool) -> AbstractContextManager[None]:
        """Clear some of the terminal's local modes within the context, and restore all modes on leaving.

        Args:
            flags: The local modes to clear, such as termios.ECHO.
            discards_input: Whether unread input is discarded at each change.
        """
        before = termios.tcgetattr(self._stdin)
        modes = [*before[:3], before[3] & ~flags, *before[4:]]
        return signals.undo_on_exit(
            partial(self._set_modes, before, discards_input), do=partial(self._set_modes, modes, discards_input)
        )

    def _set_modes(self, modes: list[Any], discards_input: bool) -> None:
        if is_in_foreground(self._stdin):  # a background job would be stopped
            with suppress(termios.error):  # the terminal has closed
                if discards_input:
                    termios.tcflush(self._stdin, termios.TCIFLUSH)
                termios.tcsetattr(self._stdin, termios.TCSANOW, modes)
