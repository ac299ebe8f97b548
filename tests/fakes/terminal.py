"""The command as a process: with pipes, or as a shell's job in a pseudo-terminal whose screen can be read."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from tests.conftest import Pair
from tests.tools.checkpoint_files import ROOT

COMMAND = [sys.executable, str(ROOT / "specdec.py")]
PROMPT = "the then"
LONGEST = 600.0  # seconds; the first run on a machine compiles, for minutes where that is slow or busy


def with_pair(pair: Pair, *more: object) -> list[object]:
    """One thread, which is all that these models need, and proposals that do not hang on the clock."""
    draft = [] if "-d" in more else ["-d", pair.draft]  # which stands there once
    return ["-m", pair.target, *draft, "-i", PROMPT, "-s", 5, "-j", 1, "-g", 4, *more]


def endless(pair: Pair, *more: object) -> list[object]:
    return with_pair(pair, "-m", pair.endless, *more)


ENDS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


def hear_signals() -> None:
    """In a child: the test itself may run where a shell, or nohup, has turned some off."""
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def started(arguments: Sequence[object], command: Sequence[str] = COMMAND, **more: Any) -> Iterator[Any]:
    """A process with pipes that is gone at the end, whatever happened."""
    command = [*command, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": hear_signals} | more
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal; on systems without /proc, after a second it has."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        time.sleep(1)
        return True
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signum - 1) & 1)  # type: ignore[index]


def wait_until(condition: Callable[[], bool], seconds: float = LONGEST) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Screen:
    """A small terminal: rows that have scrolled out stay, and any escape code but the few of the panel is an error.

    A row is a list of cells; the second cell of a wide character is empty. pictures: the window at the end of each frame.
    pages: with 1 it knows no second page, like some terminals, and shows everything on the first.
    """

    CODE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")

    def __init__(self, width: int, height: int, pages: int = 2) -> None:
        self.width, self.height, self.pages = width, height, pages
        self.rows: list[list[str]] = [[]]
        self.wrapped = [False]
        self.row = self.column = 0
        self.first_page: tuple[list[list[str]], list[bool], int, int] | None = None  # while the second is shown
        self.cursor_hidden = self.hid_cursor = self.cuts = self.in_frame = False
        self.styles: set[int] = set()
        self.pictures: list[str] = []

    def feed(self, output: str) -> None:
        at = 0
        while at < len(output):
            code = self.CODE.match(output, at)
            if code:
                self.control(*code.groups())
                at = code.end()
            else:
                self.put(output[at])
                at += 1

    def control(self, private: str, numbers: str, letter: str) -> None:
        n = int(numbers or 1) if numbers.isdecimal() or not numbers else 0
        if private:
            self.set_mode(n, letter)
        elif letter == "A":
            self.row = max(self.row - n, self.top)
        elif letter == "G":
            self.column = min(n, self.width) - 1
        elif (numbers, letter) == ("", "K"):
            self.erase_rest_of_row()
        elif (numbers, letter) == ("", "J"):
            self.erase_rest_of_row()
            self.rows[self.row + 1 :] = [[] for _ in self.rows[self.row + 1 :]]
        elif letter == "m":
            self.styles |= {int(n or 0) for n in numbers.split(";")}
        else:
            raise AssertionError(f"escape code {private}{numbers}{letter}")

    def set_mode(self, mode: int, letter: str) -> None:
        assert letter in "lh"
        is_on = letter == "h"
        if mode == 25:
            self.cursor_hidden = not is_on
            self.hid_cursor |= self.cursor_hidden
        elif mode == 7:
            self.cuts = not is_on
        elif mode == 2026:
            if self.in_frame and not is_on:
                self.pictures.append(self.window())
            self.in_frame = is_on
        elif mode == 1049 and self.pages == 2 and is_on and not self.first_page:
            self.first_page = self.rows, self.wrapped, self.row, self.column
            self.rows, self.wrapped = [[] for _ in self.rows], [False for _ in self.rows]
        elif mode == 1049 and self.pages == 2 and not is_on and self.first_page:
            self.rows, self.wrapped, self.row, self.column = self.first_page
            self.first_page = None
        else:
            assert mode == 1049, f"mode {mode}"

    def erase_rest_of_row(self) -> None:
        del self.rows[self.row][min(self.column, self.width - 1) :]
        self.wrapped[self.row] = False

    def resize(self, width: int, height: int) -> None:
        """A lower one pushes rows out at the top, and the cursor stays where it is in the window."""
        in_window = self.row - self.top
        if height < self.height:
            missing = max(0, self.top + self.height - len(self.rows))
            self.rows += [[] for _ in range(missing)]
            self.wrapped += [False] * missing
        self.width, self.height = width, height
        self.rows = [row[:width] for row in self.rows]
        self.row = min(self.top + in_window, len(self.rows) - 1)

    @property
    def top(self) -> int:
        return max(0, len(self.rows) - self.height)

    def put(self, character: str) -> None:
        if character == "\n":
            self.down()
        elif character == "\r":
            self.column = 0
        elif character not in "\x03\x1a":  # the echo of Ctrl-C and Ctrl-Z, of which a terminal shows nothing
            assert unicodedata.category(character) != "Cc", repr(character)
            width = cell_len(character)
            if self.column + width > self.width and self.cuts:
                self.column = self.width - width
            elif self.column + width > self.width:
                self.wrapped[self.row] = True
                self.down()
                self.column = 0
            row = self.rows[self.row]
            row += " " * (self.column + width - len(row))
            row[self.column : self.column + width] = [character, ""][:width]
            self.column += width

    def down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])
            self.wrapped.append(False)

    def window(self) -> str:
        return "\n".join(["".join(row) for row in self.rows[self.top :]])

    def text(self) -> str:
        """All that is left to see, with the rows joined that the terminal itself broke."""
        pairs = zip(self.rows, self.wrapped, strict=True)
        return "".join(["".join(row) + "\n" * (not wrapped) for row, wrapped in pairs])


SHELL = """
import fcntl, os, signal, sys, termios
tell, told = int(sys.argv[1]), int(sys.argv[2])
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGTTOU, signal.SIGINT, signal.SIGTSTP, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    for number in (signal.SIGTTOU, signal.SIGINT, signal.SIGTSTP, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.argv[3], sys.argv[3:])
os.write(tell, b"%d\\n" % job)
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        break
    os.write(tell, b"stopped\\n")
    if os.read(told, 1) == b"f":
        os.tcsetpgrp(0, job)
    os.killpg(job, signal.SIGCONT)
os.write(tell, b"%d\\n" % os.waitstatus_to_exitcode(status))
"""


class Job:
    """The command in the foreground of a shell in a terminal of that size. raw: what it has written so far."""

    def __init__(
        self, arguments: Sequence[object], width: int = 80, height: int = 24, command: Sequence[str] = COMMAND, **environment: str
    ) -> None:
        self.width, self.height, self.raw = width, height, b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))
        self._reports, tell = os.pipe()
        told, self._orders = os.pipe()
        shell = [sys.executable, "-c", SHELL, str(tell), str(told), *command, *map(str, arguments)]
        self._shell = subprocess.Popen(
            shell, stdin=theirs, stdout=theirs, stderr=theirs,
            env=os.environ | environment, start_new_session=True, pass_fds=(tell, told),
        )  # fmt: skip
        for descriptor in (theirs, tell, told):
            os.close(descriptor)
        self.pid = int(self.report())

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for kill in (lambda: os.killpg(self.pid, signal.SIGKILL), self._shell.kill):
            with contextlib.suppress(ProcessLookupError):
                kill()
        self._shell.wait()
        for descriptor in (self._ours, self._reports, self._orders):
            os.close(descriptor)

    def report(self) -> str:
        """What the shell says next: "stopped" or the exit code; meanwhile the terminal is read."""
        text, deadline = "", time.monotonic() + LONGEST
        while not text.endswith("\n"):
            assert time.monotonic() < deadline, "the shell says nothing"
            self._read(self._reports)
            if select.select([self._reports], [], [], 0)[0]:
                block = os.read(self._reports, 1).decode()
                assert block, "the shell is gone"
                text += block
        self._read(None, 0.02)
        return text.strip()

    def read_until(self, *, frames: int = 0, word: str = "") -> None:
        """Read the terminal until it has drawn that many more frames, and the word."""
        start = len(self.raw)

        def is_there() -> bool:
            self._read(None, 0.02)
            new = self.raw[start:]
            return new.count("╰".encode()) >= frames and word.encode() in new

        wait_until(is_there)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def go_on(self, *, in_foreground: bool = True) -> None:
        os.write(self._orders, b"f" if in_foreground else b"b")

    def echoes(self) -> bool:
        """Whether what is typed is shown, and kept until the end of a line."""
        flags = termios.tcgetattr(self._ours)[3]
        shown = {bool(flags & flag) for flag in (termios.ECHO, termios.ECHOCTL, termios.ICANON)}
        assert len(shown) == 1
        return shown.pop()

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))

    def screen(self, pages: int = 2) -> Screen:
        screen = Screen(self.width, self.height, pages)
        screen.feed(self.raw.decode())
        return screen

    def _read(self, also: int | None, seconds: float = LONGEST) -> None:
        """What there is from the terminal; returns once the other descriptor has something too, or the time is over."""
        deadline = time.monotonic() + seconds
        wanted = [self._ours, *([] if also is None else [also])]
        while True:
            ready = select.select(wanted, [], [], max(0.0, deadline - time.monotonic()))[0]
            if self._ours in ready:
                try:
                    self.raw += os.read(self._ours, 65536)
                except OSError:  # how Linux says that the other side is closed
                    wanted.remove(self._ours)
            if also in ready or not ready or not wanted:
                return


def in_terminal(
    arguments: Sequence[object],
    width: int,
    height: int,
    interrupt_after: int | None = None,
    command: Sequence[str] = COMMAND,
    **environment: str,
) -> tuple[int, Screen, str]:
    """Run in a terminal of that size: exit code, screen, raw output. Ctrl-C is typed after that many frames."""
    with Job(arguments, width, height, command, **environment) as job:
        if interrupt_after is not None:
            job.read_until(frames=interrupt_after)
            job.type(b"\x03")
        code = int(job.report())
        return code, job.screen(), job.raw.decode()
