"""Reading of the prompt: from -i, a file, a word of the command line, or a pipe."""

import os
import select
import stat
import sys
from contextlib import suppress
from pathlib import Path

from specdec.cli.output_errors import print_message

DEFAULT_PROMPT = "Once upon a time"
STDIN = "-"  # names stdin as a prompt or a file
STDIN_WAIT_S = 0.5  # silence of a pipe before a message says that we wait for it
MAX_PROMPT_BYTES = 16 << 20


def read_prompt(prompt: str | None, file: str = "", word: str | None = None) -> str:
    """Return the prompt's text from -i, a file, a positional word or piped stdin, else the default prompt.

    The last line break of a file or of stdin is removed.

    Args:
        prompt: Text of -i, or "-" for stdin. None: not given.
        file: File of -f, or "-" for stdin. "": not given.
        word: Text of the word, or "-" for stdin. None: not given.

    Raises:
        ValueError: More than one is given, or the input cannot be read.
    """
    sources = {"-i": prompt, "-f": file or None, repr(word): word}
    given = {source: value for source, value in sources.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"expected one prompt, got {' and '.join(given)}; leave one out")
    if file or STDIN in given.values():
        text = read_text_input(file)
    elif given:
        return "".join(given.values())
    else:
        text = (_is_piped() and read_text_input("")) or DEFAULT_PROMPT
    return text.removesuffix("\n").removesuffix("\r")


def read_first_message(prompt: str | None, file: str) -> str:
    """Return the first message of a conversation: the text of -i, of a file and of piped stdin, separated by blank lines.

    Args:
        prompt: Text of -i; None or "-" adds nothing.
        file: File of -f; "" or "-" adds nothing.

    Raises:
        ValueError: The file or stdin cannot be read.
    """
    parts = ["" if prompt == STDIN else prompt or "", read_text_input(file).strip() if file not in ("", STDIN) else ""]
    if sys.stdin and not sys.stdin.isatty():
        parts.append(read_text_input("", "it is added to the first message").strip())
    return "\n\n".join(filter(None, parts))


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
    if b"\0" in data:
        raise ValueError(f"{source} is a binary file: it contains a zero byte; expected UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not valid UTF-8 at byte {error.start}; expected UTF-8 text") from None


def _is_piped() -> bool:
    with suppress(OSError):
        mode = os.fstat(0).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


def _warn_if_stdin_is_silent(advice: str) -> None:
    """Print a line with advice on stderr if stdin is not a terminal and sends nothing within STDIN_WAIT_S."""
    with suppress(OSError, ValueError):  # Windows cannot select on a pipe
        if not os.isatty(0) and not select.select([0], [], [], STDIN_WAIT_S)[0]:
            print_message(f"waiting for a prompt from stdin; {advice}")
