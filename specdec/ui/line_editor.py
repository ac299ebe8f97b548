"""The line editor of the chat: multi-line messages, history, completion and pasted text."""

import codecs
import io
import json
import locale
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

try:
    import readline

    editor: ModuleType | None = readline
except ImportError:  # Windows, or a Python built without it: plain input
    editor = None

from specdec.loaders import write_text_atomically
from specdec.ui.keyboard import Keyboard
from specdec.ui.signals import CONTINUE_SIGNAL, signals

PROMPT, CONTINUATION_PROMPT = ">>> ", "... "
FENCE = '"""'  # surrounds a message of several lines
MAX_HISTORY_MESSAGES, MAX_HISTORY_MESSAGE_LENGTH = 1000, 1 << 16  # over all sessions; characters
MAX_RECALLED_LINES, MAX_RECALLED_LENGTH = 8, 800  # of a message that is recalled as it is, since readline draws no more than fits
LABEL_LENGTH = 40  # characters of a longer message in the label that is recalled in its place
COMMAND_KEYS = {r"\C-t": "/thought"}  # of GNU readline
PASTE_WINDOW_S = 0.02  # the next line of a paste arrives within it
BOLD_ON, BOLD_OFF = "\x01\x1b[1m\x02", b"\x1b[m"  # \x01 and \x02 mark zero width for readline
UTF8_LOCALES = ("C.UTF-8", "UTF-8", "en_US.UTF-8")  # on Linux, macOS, older systems
BRACKETED_PASTE_ON, BRACKETED_PASTE_OFF = b"\x1b[?2004h", b"\x1b[?2004l"
# Characters without width that readline inserts where a paste begins and ends. Its own mode for pastes is off: it draws a paste
# as one buffer, which must fit the screen.
PASTE_BEGIN, PASTE_END = "\u2063", "\u2064"
PASTE_KEYS = {r"\e[200~": PASTE_BEGIN, r"\e[201~": PASTE_END}


def get_state_folder() -> Path:
    """Return the folder of the chat's history and last conversation, in $XDG_STATE_HOME or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"), "specdec")


class LineEditor:
    """A reader of the user's messages at the terminal.

    Pasted text is one message, line breaks included: the terminal marks it, or its lines arrive faster than anyone types. The
    user ends a marked paste with Enter. Each line typed during an answer is a message of its own. A long message is recalled by
    a label, which stands for it in the next message.

    Args:
        history: File of past messages, None for none.
        is_command: Whether a line is a command, which never continues a message.
        get_completions: Returns the completions of a command's beginning.
        is_bold: Whether input is shown in bold, to set it apart from answers.
    """

    def __init__(
        self, history: Path | None, is_command: Callable[[str], bool], get_completions: Callable[[str], list[str]], is_bold: bool
    ) -> None:
        """Set up the terminal's line editing, and load the history."""
        self._history, self._is_command, self._get_completions = history, is_command, get_completions
        self._candidates: list[str] = []  # completions of the word at the cursor
        self._queued_lines: list[str] = []  # lines read ahead
        self._is_pasting = self._was_pasting = False  # whether a paste has begun and not ended; also before the last line
        self._muted = ExitStack()  # mutes the echo between the lines of a paste; readline would not echo either
        self._labelled = dict[str, str]()  # long messages by the label that is recalled
        self._bold_on, self._bold_off = (BOLD_ON, BOLD_OFF) if is_bold and editor else ("", b"")
        is_gnu = editor is not None and "libedit" not in (editor.__doc__ or "")
        has_bracketed_paste = is_gnu and os.environ.get("TERM", "dumb") != "dumb"
        self._paste_on, self._paste_off = (BRACKETED_PASTE_ON, BRACKETED_PASTE_OFF) if has_bracketed_paste else (b"", b"")
        self._encoding = sys.stdin.encoding  # for bytes that are not UTF-8
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if editor:
            _set_utf8_locale()
            editor.parse_and_bind("set enable-bracketed-paste off")
            editor.parse_and_bind("set show-all-if-ambiguous on")
            editor.parse_and_bind("tab: complete" if is_gnu else "bind ^I rl_complete")
            if is_gnu:  # a key for a command replaces what was typed
                for key, command in COMMAND_KEYS.items():
                    editor.parse_and_bind(f'"{key}": "\\C-a\\C-k{command}\\C-m"')
                for key, mark in PASTE_KEYS.items():
                    editor.parse_and_bind(f'"{key}": "{mark}"')
            editor.set_completer_delims(" ")
            editor.set_completer(self._complete)
            editor.set_auto_history(False)
            editor.clear_history()
            for message in self._load_history():
                self._add_to_history(message)

    def session(self) -> AbstractContextManager[None]:
        """Return a context for a conversation; leaving it, also by a signal, turns off the terminal's bracketed paste."""
        return signals.undo_on_exit(lambda: _write_terminal(self._paste_off))

    def read(self) -> str:
        """Read the user's next message, add it to the history and return it; a line that was read ahead comes first.

        Raises:
            EOFError: The user pressed Ctrl-D.
            KeyboardInterrupt: The user pressed Ctrl-C.
        """
        if self._queued_lines:
            return self._queued_lines.pop()
        restore_on_kill = signals.undo_on_kill(lambda: _write_terminal(self._bold_off + b"\n"))
        with signals.raise_interrupts(), restore_on_kill, Keyboard().restore_modes_on_kill(), self._muted:
            was_typed_before, self._is_pasting = _has_input(0), False
            message, self._queued_lines = read_message(
                self._read_line,
                lambda: self._is_pasting or (not was_typed_before and _has_input(PASTE_WINDOW_S)),
                lambda line: not (self._is_pasting or self._was_pasting) and self._is_command(line),
            )
        for label, long_message in self._labelled.items():
            message = message.replace(label, long_message)
        self._save_to_history(message)
        return message

    def _read_line(self, prompt: str) -> str:
        self._muted.close()
        self._was_pasting = self._is_pasting
        _write_terminal(self._paste_on)
        try:
            line = self._decode(_input_line(self._bold_on + prompt))
        finally:
            _write_terminal(self._bold_off)
        if PASTE_BEGIN in line or PASTE_END in line:
            self._is_pasting = line.rfind(PASTE_BEGIN) > line.rfind(PASTE_END)
            line = line.replace(PASTE_BEGIN, "").replace(PASTE_END, "")
        if self._is_pasting:
            self._muted.enter_context(Keyboard().mute_echo())
        return line

    def _decode(self, line: str) -> str:
        """Decode a line with stdin's original encoding if it is not UTF-8; if that fails too, return it with its surrogates."""
        with suppress(UnicodeError):
            line.encode()
            return line
        with suppress(UnicodeError):
            return line.encode("utf-8", "surrogateescape").decode(self._encoding)
        return line

    def _complete(self, word: str, i: int) -> str | None:
        """Return the i-th completion of the word at the cursor for Tab, None if there are fewer; in a message, Tab adds a tab."""
        assert editor
        if not i:
            typed = editor.get_line_buffer().encode("utf-8", "surrogateescape")[: editor.get_endidx()]
            line = typed.decode("utf-8", "surrogateescape")
            is_pasted = self._is_pasting or PASTE_BEGIN in line
            self._candidates = (
                [word + completion[len(line) :] for completion in self._get_completions(line)]
                if line.startswith("/") and not is_pasted
                else [f"{word}\t"]
            )
        return self._candidates[i] if i < len(self._candidates) else None

    def _load_history(self) -> list[str]:
        try:
            lines = self._history.read_text(encoding="utf-8").splitlines() if self._history else []
        except (OSError, ValueError):
            return []
        messages = []
        for line in lines[-MAX_HISTORY_MESSAGES:]:
            with suppress(ValueError, RecursionError):  # a line that was written only in part
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, str)]

    def _save_to_history(self, message: str) -> None:
        if not message.strip() or not editor:
            return
        last = editor.get_history_item(editor.get_current_history_length()) or ""
        if message == self._labelled.get(last, last):
            return
        self._add_to_history(message)
        if not self._history or len(message) > MAX_HISTORY_MESSAGE_LENGTH:
            return
        with suppress(OSError, ValueError):  # the home directory is not writable
            self._history.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(one) for one in [*self._load_history(), message][-MAX_HISTORY_MESSAGES:]]
            write_text_atomically(self._history, "\n".join(lines) + "\n", 0o600)

    def _add_to_history(self, message: str) -> None:
        """Add a message, or the label of a long one, to readline's history."""
        assert editor
        n_lines = message.count("\n") + 1
        if n_lines > MAX_RECALLED_LINES or len(message) > MAX_RECALLED_LENGTH:
            start = " ".join(message.split())[:LABEL_LENGTH]
            label = f"[{start}… {n_lines:,} lines, {len(message):,} characters]"
            self._labelled[label] = message
            message = label
        with suppress(ValueError):  # an incomplete character, or one that the locale cannot encode
            editor.add_history(message)


def read_message(
    read_line: Callable[[str], str], is_pasted: Callable[[], bool], is_command: Callable[[str], bool]
) -> tuple[str, list[str]]:
    '''Read a message line by line; return it, and a list with the command that ended a paste, empty if there was none.

    A message is one line, several lines joined by backslashes, a paste, or everything between """ and """. A command in a paste
    ends the message, and is to be handled after it.

    Args:
        read_line: Shows a prompt and returns the line that the user enters.
        is_pasted: Returns whether the next line of a paste is waiting.
        is_command: Returns whether a line is a command.
    '''
    lines = [read_line(PROMPT)]
    is_more = not is_command(lines[0]) and is_pasted()
    if lines[0].lstrip().startswith(FENCE) and not is_more and "\n" not in lines[0]:
        while not _is_fenced("\n".join(lines)):
            lines.append(read_line(CONTINUATION_PROMPT))
    while is_more or lines[-1].endswith("\\"):
        if not is_more:
            lines[-1] = lines[-1][:-1]
        line = read_line(CONTINUATION_PROMPT)
        if is_more and is_command(line):
            return "\n".join(lines), [line]
        lines.append(line)
        is_more = is_pasted()
    message = "\n".join(lines)
    return (message.strip().removeprefix(FENCE).removesuffix(FENCE) if _is_fenced(message) else message).strip("\n"), []


def _is_fenced(message: str) -> bool:
    message = message.strip()
    return len(message) >= 2 * len(FENCE) and message.startswith(FENCE) and message.endswith(FENCE)


def _write_terminal(code: bytes) -> None:
    with suppress(OSError, ValueError):  # the terminal has closed
        os.write(sys.stdout.fileno(), code)


def _has_input(seconds: float) -> bool:
    """Return whether stdin has input within some seconds; always False where stdin cannot be polled (Windows)."""
    with suppress(OSError, ValueError):
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    return False


def _set_utf8_locale() -> None:
    """Set the process's locale and LC_ALL to UTF-8 for readline, if the current encoding is ASCII, as with LC_ALL=C."""
    try:
        is_ascii = codecs.lookup(locale.nl_langinfo(locale.CODESET) or "ascii").name == "ascii"
    except LookupError:  # an encoding that Python does not know
        return
    for name in UTF8_LOCALES if is_ascii else ():
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            os.environ["LC_ALL"] = name  # readline reads it itself
            return


class _ResumedError(Exception):
    """Raised when the job is in the foreground again; readline's state of the terminal is then outdated."""


def _input_line(prompt: str) -> str:
    """Show a prompt and read a line from the terminal; after Ctrl-Z and `fg`, show the prompt and the typed text again."""
    if CONTINUE_SIGNAL is None or not editor:
        return input(prompt)
    before = ""
    while True:
        try:
            editor.set_startup_hook(lambda text=before: editor.insert_text(text))
            signal.signal(CONTINUE_SIGNAL, _raise_resumed)
            return input(prompt)
        except _ResumedError:
            before = editor.get_line_buffer()
        finally:
            signal.signal(CONTINUE_SIGNAL, signal.SIG_DFL)
            editor.set_startup_hook(None)


def _raise_resumed(*_: object) -> NoReturn:
    raise _ResumedError
