"""Messages as a person types them: lines, history, what is pasted. Knows no views and no models."""

import codecs
import io
import json
import locale
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

try:
    import readline

    editor: ModuleType | None = readline
except ImportError:  # Windows, or a Python built without it: lines come as the terminal gives them
    editor = None

from specdec.loaders import replace_text
from specdec.ui.keyboard import Keyboard
from specdec.ui.signals import GO_ON, signals

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'  # around a message of several lines
MOST_REMEMBERED, LONGEST_REMEMBERED = 1000, 1 << 16  # messages, over sessions; characters of one
PASTE_SECONDS = 0.02  # within which the next line of a paste is there
BOLD, NO_LONGER_BOLD = "\x01\x1b[1m\x02", b"\x1b[m"  # the former in what tells an editor that it takes no room
UTF8_LOCALES = ("C.UTF-8", "UTF-8", "en_US.UTF-8")  # on Linux, macOS, older systems
PASTES, NO_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"


def state_folder() -> Path:
    """Where is what outlives a session."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"), "specdec")


class Lines:
    """The messages of a person at the terminal, while `listening`.

    What is pasted at once is one message, line breaks and all: the terminal says what is pasted, or else the lines come faster
    than anyone types. Lines that were typed during an answer are a message each.

    history: the file in which messages are remembered, None for none; is_command: whether a line is no part of a message;
    completions: the lines that a command's beginning may become; is_bold: what is typed, beside answers that are not.
    """

    def __init__(
        self, history: Path | None, is_command: Callable[[str], bool], completions: Callable[[str], list[str]], is_bold: bool
    ) -> None:
        self._history, self._is_command, self._completions = history, is_command, completions
        self._ways: list[str] = []  # how the word at the cursor may go on
        self._next: list[str] = []  # a line that has been read already
        self._bold, self._no_longer_bold = (BOLD, NO_LONGER_BOLD) if is_bold and editor else ("", b"")
        is_gnu = editor is not None and "libedit" not in (editor.__doc__ or "")
        is_told_of_pastes = is_gnu and os.environ.get("TERM", "dumb") != "dumb"
        self._pastes, self._no_pastes = (PASTES, NO_PASTES) if is_told_of_pastes else (b"", b"")
        self._encoding = sys.stdin.encoding  # of bytes that are no UTF-8
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if editor:
            _speak_utf8()
            editor.parse_and_bind("set enable-bracketed-paste on")
            editor.parse_and_bind("set show-all-if-ambiguous on")
            editor.parse_and_bind("tab: complete" if is_gnu else "bind ^I rl_complete")
            editor.set_completer_delims(" ")
            editor.set_completer(self._complete)
            editor.set_auto_history(False)
            editor.clear_history()
            for message in self._remembered():
                _add_to_history(message)

    def listening(self) -> AbstractContextManager[None]:
        """Around a talk: at its end the terminal is as it was."""
        return signals.undone(lambda: _tell_terminal(self._no_pastes))

    def read(self) -> str:
        """The next message. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C, of what was typed till then."""
        if self._next:
            return self._next.pop()
        at_sudden_end = signals.at_sudden_end(lambda: _tell_terminal(self._no_longer_bold + b"\n"))
        with signals.asking(), at_sudden_end, Keyboard().as_it_was():
            was_typed_before = _is_waiting(0)
            message, self._next = whole(self._line, lambda: not was_typed_before and _is_waiting(PASTE_SECONDS), self._is_command)
        self._remember(message)
        return message

    def _line(self, prompt: str) -> str:
        try:
            return self._decoded(_edited(self._bold + prompt))
        finally:
            _tell_terminal(self._no_longer_bold + self._pastes)  # during the answer too

    def _decoded(self, line: str) -> str:
        """A line whose bytes are no UTF-8 in the encoding that the locale or somebody has named; else half characters stay."""
        with suppress(UnicodeError):
            line.encode()
            return line
        with suppress(UnicodeError):
            return line.encode("utf-8", "surrogateescape").decode(self._encoding)
        return line

    def _complete(self, word: str, i: int) -> str | None:
        """The i-th way that the word at the cursor may go on, for the editor's Tab; in a message it is a Tab."""
        assert editor
        if not i:
            typed = editor.get_line_buffer().encode("utf-8", "surrogateescape")[: editor.get_endidx()]
            line = typed.decode("utf-8", "surrogateescape")
            self._ways = [word + way[len(line) :] for way in self._completions(line)] if line.startswith("/") else [f"{word}\t"]
        return self._ways[i] if i < len(self._ways) else None

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
        _add_to_history(message)
        if not self._history or len(message) > LONGEST_REMEMBERED:
            return
        with suppress(OSError, ValueError):  # a home that cannot be written to
            self._history.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(one) for one in [*self._remembered(), message][-MOST_REMEMBERED:]]
            replace_text(self._history, "\n".join(lines) + "\n", 0o600)


def whole(
    line_of: Callable[[str], str], is_pasted: Callable[[], bool], is_command: Callable[[str], bool]
) -> tuple[str, list[str]]:
    '''A message: a line, several behind backslashes, a paste, or all between """ and """; and the command behind a paste.

    is_pasted: whether another line is there already.
    '''
    lines = [line_of(PROMPT)]
    is_more = not is_command(lines[0]) and is_pasted()
    if lines[0].lstrip().startswith(FENCE) and not is_more and "\n" not in lines[0]:
        while not _is_fenced("\n".join(lines)):
            lines.append(line_of(MORE))
    while is_more or lines[-1].endswith("\\"):
        if not is_more:
            lines[-1] = lines[-1][:-1]
        line = line_of(MORE)
        if is_more and is_command(line):
            return "\n".join(lines), [line]
        lines.append(line)
        is_more = is_pasted()
    message = "\n".join(lines)
    return (message.strip().removeprefix(FENCE).removesuffix(FENCE) if _is_fenced(message) else message).strip("\n"), []


def _is_fenced(message: str) -> bool:
    message = message.strip()
    return len(message) >= 2 * len(FENCE) and message.startswith(FENCE) and message.endswith(FENCE)


def _tell_terminal(code: bytes) -> None:
    with suppress(OSError, ValueError):  # it has gone
        os.write(sys.stdout.fileno(), code)


def _is_waiting(seconds: float) -> bool:
    """Whether a line is there to be read, or is within that time; without such a look (Windows) none is."""
    with suppress(OSError, ValueError):
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    return False


def _add_to_history(message: str) -> None:
    assert editor
    with suppress(ValueError):  # half a character, or a locale that knows too few
        editor.add_history(message)


def _speak_utf8() -> None:
    """Where the locale knows ASCII alone, as LC_ALL=C does, the editor gets one that knows what terminals send."""
    try:
        is_ascii = codecs.lookup(locale.nl_langinfo(locale.CODESET) or "ascii").name == "ascii"
    except LookupError:  # one that Python does not know
        return
    for name in UTF8_LOCALES if is_ascii else ():
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            os.environ["LC_ALL"] = name  # the editor asks itself
            return


class _BackAgain(Exception):
    """The job is in the foreground again; what it knew of the terminal no longer holds."""


def _edited(prompt: str) -> str:
    """A line; after Ctrl-Z and `fg` the prompt and what was typed stand there again."""
    if GO_ON is None or not editor:
        return input(prompt)
    before = ""
    while True:
        try:
            editor.set_startup_hook(lambda text=before: editor.insert_text(text))
            signal.signal(GO_ON, _come_back)
            return input(prompt)
        except _BackAgain:
            before = editor.get_line_buffer()
        finally:
            signal.signal(GO_ON, signal.SIG_DFL)
            editor.set_startup_hook(None)


def _come_back(*_: object) -> NoReturn:
    raise _BackAgain
