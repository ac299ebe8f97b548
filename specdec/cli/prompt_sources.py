"""Reading of the prompt: from -i or a word of the command line, a file and a pipe."""

import os
import select
import stat
from contextlib import suppress
from pathlib import Path

from specdec.argument_checks import UTF16_MARKS, decode_text
from specdec.cli.output_errors import print_message

DEFAULT_PROMPT = "Once upon a time"
STDIN = "-"  # names stdin as a prompt or a file
STDIN_WAIT_S = 0.5  # silence of a pipe before a message says that we wait for it
MAX_PROMPT_BYTES = 16 << 20


def read_prompt(prompt: str | None, file: str = "", word: str | None = None) -> str:
    """Return the prompt: the text of -i or of a word, that of a file and piped text, separated by blank lines.

    The last line break of a file and of piped text is removed. Without any of them, this is the default prompt.

    Args:
        prompt: Text of -i, or "-" for stdin. None: not given.
        file: File of -f, or "-" for stdin. "": not given.
        word: Text of the word, or "-" for stdin. None: not given.

    Raises:
        ValueError: Both -i and a word are given, or the input cannot be read.
    """
    if prompt is not None and word is not None:
        raise ValueError(f"expected one prompt, got -i and {word!r}; leave one out")
    text = word if prompt is None else prompt
    parts = _read_parts(text, file)
    return DEFAULT_PROMPT if text is None and not file and not parts else "\n\n".join(parts)


def read_first_message(prompt: str | None, file: str) -> str:
    """Return the first message of a conversation: the text of -i, of a file and of piped stdin, separated by blank lines.

    Args:
        prompt: Text of -i; None or "-" adds nothing.
        file: File of -f; "" or "-" adds nothing.

    Raises:
        ValueError: The file or stdin cannot be read.
    """
    return "\n\n".join(filter(None, map(str.strip, _read_parts(prompt, file))))


def _read_parts(text: str | None, file: str) -> list[str]:
    """Return the parts of a prompt that are not empty: a given text, the text of a file, and that of stdin if it is piped."""
    has_text, has_file = text not in (None, STDIN), file not in ("", STDIN)
    parts = [text if text and has_text else "", _remove_line_break(read_text_input(file)) if has_file else ""]
    if STDIN in (text, file) or is_piped(not has_text and not has_file):
        is_added = has_text or has_file
        source = read_text_input("", "it is added to the prompt; < /dev/null leaves it out") if is_added else read_text_input("")
        parts.append(_remove_line_break(source))
    return [part for part in parts if part]


def _remove_line_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def read_text_input(file: str, advice: str = "use -i TEXT to give one") -> str:
    """Return the text of a file, or of stdin if the name is "-" or empty; print a message if stdin sends nothing at first.

    Args:
        file: The file's name.
        advice: Advice in the message, for users who did not expect that stdin is read.

    Raises:
        ValueError: The file cannot be read, is too large, or is not UTF-8 text.
    """
    file = "" if file == STDIN else file
    source = file or "stdin"
    if not file:
        _warn_if_stdin_is_silent(advice)
    try:
        with Path(file).open("rb") if file else os.fdopen(0, "rb", closefd=False) as stream:
            data = stream.read(MAX_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise ValueError(f"{source} has more than {MAX_PROMPT_BYTES >> 20} MiB; expected a shorter text")
    if b"\0" in data and not data.startswith(UTF16_MARKS):
        raise ValueError(f"{source} is a binary file: it contains a zero byte; expected UTF-8 text")
    try:
        return decode_text(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not valid UTF-8 at byte {error.start}; expected UTF-8 text") from None


def is_piped(can_be_socket: bool) -> bool:
    """Return whether stdin is a pipe or a file; a socket, as other programs give to their child processes, may stay silent."""
    with suppress(OSError):
        mode = os.fstat(0).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or (can_be_socket and stat.S_ISSOCK(mode))
    return False


def _warn_if_stdin_is_silent(advice: str) -> None:
    """Print a line with advice on stderr if stdin is not a terminal and sends nothing within STDIN_WAIT_S."""
    with suppress(OSError, ValueError):  # Windows cannot select on a pipe
        if not os.isatty(0) and not select.select([0], [], [], STDIN_WAIT_S)[0]:
            print_message(f"waiting for a prompt from stdin; {advice}")
