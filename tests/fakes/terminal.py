"""The command as a process: with pipes, or as a shell's job in a pseudo-terminal with a readable screen."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from tests.conftest import Pair
from tests.tools.checkpoint_files import ROOT
from tests.tools.waiting import TIMEOUT_S, wait_until

COMMAND = [sys.executable, str(ROOT / "specdec.py")]
PROMPT = "the then"


def make_arguments(pair: Pair, *more: object) -> list[object]:
    """Return options with one thread, enough for these models, and a fixed gamma, so that proposals do not depend on time."""
    draft = [] if "-d" in more else ["-d", pair.draft]  # -d may be given once
    return ["-m", pair.target, *draft, "-i", PROMPT, "-s", 5, "-j", 1, "-g", 4, *more]


def make_endless_arguments(pair: Pair, *more: object) -> list[object]:
    return make_arguments(pair, "-m", pair.endless, *more)


END_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


def reset_signals() -> None:
    """Restore default signal handling in a child; a shell or nohup may have ignored some signals for the tests."""
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def run_process(arguments: Sequence[object], command: Sequence[str] = COMMAND, **more: Any) -> Iterator[Any]:
    """Run a process with pipes, and kill it at the end if needed."""
    command = [*command, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": reset_signals} | more
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def has_signal_handler(pid: int, signum: int) -> bool:
    """Return whether the process handles the signal; without /proc, wait a second and return True."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        time.sleep(1)
        return True
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signum - 1) & 1)  # type: ignore[index]


class Screen:
    """A small terminal that keeps rows that have scrolled out; any escape code that the panel does not use is an error.

    A row is a list of cells; the second cell of a wide character is empty. frames: the window at the end of each frame.
    pages: 1 is a terminal without an alternate screen, which shows everything on the main one.
    """

    CODE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")

    def __init__(self, width: int, height: int, pages: int = 2) -> None:
        self.width, self.height, self.pages = width, height, pages
        self.rows: list[list[str]] = [[]]
        self.wrapped = [False]
        self.row = self.column = 0
        self.main_page: tuple[list[list[str]], list[bool], int, int] | None = None  # while the alternate screen is shown
        self.cursor_hidden = self.was_cursor_hidden = self.truncates_rows = self.in_frame = False
        self.styles: set[int] = set()
        self.frames: list[str] = []

    def feed(self, output: str) -> None:
        at = 0
        while at < len(output):
            code = self.CODE.match(output, at)
            if code:
                self.apply_control(*code.groups())
                at = code.end()
            else:
                self.put_character(output[at])
                at += 1

    def apply_control(self, private: str, numbers: str, letter: str) -> None:
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
            self.was_cursor_hidden |= self.cursor_hidden
        elif mode == 7:
            self.truncates_rows = not is_on
        elif mode == 2026:
            if self.in_frame and not is_on:
                self.frames.append(self.get_window())
            self.in_frame = is_on
        elif mode == 1049 and self.pages == 2 and is_on and not self.main_page:
            self.main_page = self.rows, self.wrapped, self.row, self.column
            self.rows, self.wrapped = [[] for _ in self.rows], [False for _ in self.rows]
        elif mode == 1049 and self.pages == 2 and not is_on and self.main_page:
            self.rows, self.wrapped, self.row, self.column = self.main_page
            self.main_page = None
        else:
            assert mode == 1049, f"mode {mode}"

    def erase_rest_of_row(self) -> None:
        del self.rows[self.row][min(self.column, self.width - 1) :]
        self.wrapped[self.row] = False

    def resize(self, width: int, height: int) -> None:
        """Resize the window; a lower one scrolls rows out at the top, and the cursor keeps its row in the window."""
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

    def put_character(self, character: str) -> None:
        if character == "\n":
            self.move_down()
        elif character == "\r":
            self.column = 0
        elif character not in "\x03\x1a":  # the echo of Ctrl-C and Ctrl-Z is invisible
            assert unicodedata.category(character) != "Cc", repr(character)
            width = cell_len(character)
            if self.column + width > self.width and self.truncates_rows:
                self.column = self.width - width
            elif self.column + width > self.width:
                self.wrapped[self.row] = True
                self.move_down()
                self.column = 0
            row = self.rows[self.row]
            row += " " * (self.column + width - len(row))
            row[self.column : self.column + width] = [character, ""][:width]
            self.column += width

    def move_down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])
            self.wrapped.append(False)

    def get_window(self) -> str:
        return "\n".join(["".join(row) for row in self.rows[self.top :]])

    def get_text(self) -> str:
        """Return all visible text, with wrapped rows joined."""
        pairs = zip(self.rows, self.wrapped, strict=True)
        return "".join(["".join(row) + "\n" * (not wrapped) for row, wrapped in pairs])


SHELL_PROGRAM = """
import fcntl, os, signal, sys, termios
report_pipe, order_pipe = int(sys.argv[1]), int(sys.argv[2])
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
os.write(report_pipe, b"%d\\n" % job)
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        break
    os.write(report_pipe, b"stopped\\n")
    if os.read(order_pipe, 1) == b"f":
        os.tcsetpgrp(0, job)
    os.killpg(job, signal.SIGCONT)
os.write(report_pipe, b"%d\\n" % os.waitstatus_to_exitcode(status))
"""


class ShellJob:
    """The command in the foreground of a shell in a terminal of that size. raw: its output so far."""

    def __init__(
        self, arguments: Sequence[object], width: int = 80, height: int = 24, command: Sequence[str] = COMMAND, **environment: str
    ) -> None:
        self.width, self.height, self.raw = width, height, b""
        self._terminal_fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))
        self._report_fd, report_pipe = os.pipe()
        order_pipe, self._order_fd = os.pipe()
        shell = [sys.executable, "-c", SHELL_PROGRAM, str(report_pipe), str(order_pipe), *command, *map(str, arguments)]
        self._shell = subprocess.Popen(
            shell, stdin=theirs, stdout=theirs, stderr=theirs,
            env=os.environ | environment, start_new_session=True, pass_fds=(report_pipe, order_pipe),
        )  # fmt: skip
        for descriptor in (theirs, report_pipe, order_pipe):
            os.close(descriptor)
        self.pid = int(self.read_report())

    def __enter__(self) -> "ShellJob":
        return self

    def __exit__(self, *_: object) -> None:
        for kill in (lambda: os.killpg(self.pid, signal.SIGKILL), self._shell.kill):
            with contextlib.suppress(ProcessLookupError):
                kill()
        self._shell.wait()
        for descriptor in (self._terminal_fd, self._report_fd, self._order_fd):
            os.close(descriptor)

    def read_report(self) -> str:
        """Return the shell's next report, "stopped" or the exit code, and read the terminal meanwhile."""
        text, deadline = "", time.monotonic() + TIMEOUT_S
        while not text.endswith("\n"):
            assert time.monotonic() < deadline, "the shell says nothing"
            self._read(self._report_fd)
            if select.select([self._report_fd], [], [], 0)[0]:
                block = os.read(self._report_fd, 1).decode()
                assert block, "the shell is gone"
                text += block
        self._read(None, 0.02)
        return text.strip()

    def read_until(self, *, frames: int = 0, word: str = "") -> None:
        """Read the terminal until it has drawn that many more frames and the word."""
        start = len(self.raw)

        def is_there() -> bool:
            self._read(None, 0.02)
            new = self.raw[start:]
            return new.count("╰".encode()) >= frames and word.encode() in new

        wait_until(is_there)

    def type_keys(self, keys: bytes) -> None:
        os.write(self._terminal_fd, keys)

    def resume(self, *, in_foreground: bool = True) -> None:
        os.write(self._order_fd, b"f" if in_foreground else b"b")

    def is_echoing(self) -> bool:
        """Return whether input is echoed and line-buffered."""
        flags = termios.tcgetattr(self._terminal_fd)[3]
        shown = {bool(flags & flag) for flag in (termios.ECHO, termios.ECHOCTL, termios.ICANON)}
        assert len(shown) == 1
        return shown.pop()

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._terminal_fd, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))

    def make_screen(self, pages: int = 2) -> Screen:
        screen = Screen(self.width, self.height, pages)
        screen.feed(self.raw.decode())
        return screen

    def _read(self, also: int | None, seconds: float = TIMEOUT_S) -> None:
        """Read from the terminal until the other descriptor is readable too or the time is over."""
        deadline = time.monotonic() + seconds
        wanted = [self._terminal_fd, *([] if also is None else [also])]
        while True:
            ready = select.select(wanted, [], [], max(0.0, deadline - time.monotonic()))[0]
            if self._terminal_fd in ready:
                try:
                    self.raw += os.read(self._terminal_fd, 65536)
                except OSError:  # on Linux: the other side is closed
                    wanted.remove(self._terminal_fd)
            if also in ready or not ready or not wanted:
                return


def run_in_terminal(
    arguments: Sequence[object],
    width: int,
    height: int,
    interrupt_after: int | None = None,
    command: Sequence[str] = COMMAND,
    **environment: str,
) -> tuple[int, Screen, str]:
    """Run in a terminal of that size; return exit code, screen and raw output. Ctrl-C is typed after that many frames."""
    with ShellJob(arguments, width, height, command, **environment) as job:
        if interrupt_after is not None:
            job.read_until(frames=interrupt_after)
            job.type_keys(b"\x03")
        code = int(job.read_report())
        return code, job.make_screen(), job.raw.decode()
