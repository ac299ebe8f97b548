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
    b"q": "end", b"Q": "end",
}  # fmt: skip
_KEY_PATTERN = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[^\x1b]")
_PARTIAL_KEY = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")


class Keyboard:
    """The terminal on stdin: between `open` and `close` it echoes no keys, and leaves none to the shell.

    If stdin is not a terminal it is left alone, and there are no keys.
    """

    def __init__(self, stdin: IO[str] | None = None) -> None:
        self._stdin = stdin or sys.stdin
        self._is_terminal = bool(termios and self._stdin and self._stdin.isatty())
        self._exit_stack = ExitStack()
        self.is_open = False
        self._partial_key = b""

    def open(self) -> None:
        """Mute the echo and read keys, unless open already; the job must be in the foreground, or it would be stopped."""
        if self.is_open or not self._is_terminal or not is_in_foreground(self._stdin):
            return
        # An echoed ^C would push the panel down.
        self._exit_stack.enter_context(self._clear_modes(termios.ICANON | termios.ECHO | termios.ECHOCTL, discards_input=True))
        self.is_open = True

    def close(self) -> None:
        """Restore the terminal's modes."""
        self.is_open = False
        self._exit_stack.close()

    def read_keys(self) -> list[bytes]:
        """Return the keys pressed since the last call, one per entry; none while in the background."""
        if not self.is_open or not is_in_foreground(self._stdin) or not select.select([self._stdin], [], [], 0)[0]:
            return []
        data = self._partial_key + os.read(self._stdin.fileno(), MAX_READ_BYTES)
        unfinished = _PARTIAL_KEY.search(data)
        self._partial_key = unfinished[0] if unfinished else b""
        return _KEY_PATTERN.findall(data[: len(data) - len(self._partial_key)])

    def mute_echo(self) -> AbstractContextManager[None]:
        """Mute the echo within the context; input waits for the next read."""
        if not self._is_terminal or not is_in_foreground(self._stdin):
            return nullcontext()
        return self._clear_modes(termios.ECHO | termios.ECHOCTL, discards_input=False)

    def restore_modes_on_kill(self) -> AbstractContextManager[None]:
        """Restore the terminal's current modes if the process is killed within the context."""
        if not self._is_terminal:
            return nullcontext()
        return signals.undo_on_kill(partial(self._set_modes, termios.tcgetattr(self._stdin), discards_input=False))

    def _clear_modes(self, flags: int, discards_input: bool) -> AbstractContextManager[None]:
        """Clear these modes within the context. discards_input: whether input is flushed at each change."""
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
