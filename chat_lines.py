"""Messages as a person types them: lines, history, what is pasted. Knows no views and no models."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

try:
    import readline

    editor: ModuleType | None = readline
except ImportError:  # Windows, or a Python built without it: lines come as the terminal gives them
    editor = None
try:
    import termios
except ImportError:
    termios = None  # type: ignore[assignment]

from .interrupts import signals

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'  # around a message of several lines
MOST_REMEMBERED = 1000  # messages
NO_PASTE_MODE = b"\x1b[?2004l"


def history_file() -> Path:
    """Where messages are remembered over sessions."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "specdec" / "history"


class Lines:
    """The messages of a person at the terminal. history: the file in which they are remembered, None for none.

    What is pasted at once is one message, line breaks and all, where the terminal says what is pasted.
    """

    def __init__(self, history: Path | None) -> None:
        self._history = history
        if editor:
            editor.parse_and_bind("set enable-bracketed-paste on")
            editor.set_auto_history(False)
            editor.clear_history()
            for message in self._remembered():
                editor.add_history(message)

    def read(self) -> str:
        """The next message. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C, of what was typed till then."""
        with signals.asking(), _tidy_at_the_end():
            message = whole(input)
        self._remember(message)
        return message

    def _remembered(self) -> list[str]:
        try:
            lines = self._history.read_text(encoding="utf-8").splitlines() if self._history else []
        except (OSError, ValueError):
            return []
        messages = []
        for line in lines[-MOST_REMEMBERED:]:
            with suppress(ValueError, RecursionError):  # a line that half was written
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, str)]

    def _remember(self, message: str) -> None:
        if not message.strip() or not editor:
            return
        last = editor.get_history_item(editor.get_current_history_length())
        if message == last:
            return
        with suppress(ValueError):  # half a character
            editor.add_history(message)
        if not self._history:
            return
        with suppress(OSError, ValueError):  # a home that cannot be written to
            self._history.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(one) for one in [*self._remembered(), message][-MOST_REMEMBERED:]]
            descriptor = os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")


def whole(line_of: Callable[[str], str]) -> str:
    '''A message of one line, of several behind backslashes, or of all between """ and """.'''
    line = line_of(PROMPT)
    lead = line.lstrip()
    if lead.startswith(FENCE):
        lines = [lead.removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(line_of(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(line_of(MORE))
    return "\n".join(lines)


@contextmanager
def _tidy_at_the_end() -> Iterator[None]:
    """A sudden end leaves the terminal as it was before a line was typed."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    modes = termios.tcgetattr(sys.stdin)

    def restore() -> None:
        with suppress(OSError, termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
            os.write(sys.stdout.fileno(), NO_PASTE_MODE + b"\n")

    with signals.at_sudden_end(restore, do=lambda: None):
        yield
