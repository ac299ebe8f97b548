"""Where a prompt is: behind -i, in a file, a word, a pipe. Knows no models."""

import os
import select
import stat
import sys
from contextlib import suppress
from pathlib import Path

from specdec.cli.exits import say

DEFAULT_PROMPT = "Once upon a time"
STDIN = "-"  # as a prompt or a file
WAIT_SECONDS = 0.5  # for a pipe, before somebody is told what it waits for
MOST_BYTES = 16 << 20  # of a file or a pipe


def prompt_of(prompt: str | None, file: str = "", word: str | None = None) -> str:
    """The prompt, wherever it is: an option, a file, a word, a pipe; else the usual one. A line break at its end goes."""
    ways = {"-i": prompt, "-f": file or None, repr(word): word}
    given = {way: value for way, value in ways.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are two prompts; leave one out")
    if file or STDIN in given.values():
        said = text_in(file)
    elif given:
        return "".join(given.values())
    else:
        said = (_is_piped() and text_in("")) or DEFAULT_PROMPT
    return said.removesuffix("\n").removesuffix("\r")


def message_of(prompt: str | None, file: str) -> str:
    """The first message of a talk: what was given, below it a file's text, below that a pipe's."""
    parts = ["" if prompt == STDIN else prompt or "", text_in(file).strip() if file not in ("", STDIN) else ""]
    if sys.stdin and not sys.stdin.isatty():
        parts.append(text_in("", "what it says goes behind the first message").strip())
    return "\n\n".join(filter(None, parts))


def text_in(file: str, advice: str = "-i TEXT gives one") -> str:
    """Return the text of a file; of stdin if it is - or has no name. Raises ValueError for a file that is no text.

    Args:
        file: The file's name.
        advice: What to do instead of waiting for stdin.
    """
    file = "" if file == STDIN else file
    source = file or "stdin"
    if not file:
        _tell_if_nothing_comes(advice)
    try:
        with Path(file).open("rb") if file else os.fdopen(0, "rb", closefd=False) as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"{source} has more than {MOST_BYTES >> 20} MiB; expected a text")
    if b"\0" in data:
        raise ValueError(f"{source} is binary: it holds a zero byte; expected a text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not valid UTF-8 at byte {error.start}; expected a text") from None


def _is_piped() -> bool:
    with suppress(OSError):
        mode = os.fstat(0).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


def _tell_if_nothing_comes(advice: str) -> None:
    """A line on stderr where stdin is a pipe that is silent."""
    with suppress(OSError, ValueError):  # Windows has no such look at a pipe
        if not os.isatty(0) and not select.select([0], [], [], WAIT_SECONDS)[0]:
            say(f"waiting for a prompt from stdin; {advice}")
