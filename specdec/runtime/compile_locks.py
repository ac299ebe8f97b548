"""Who compiles what, where several processes need the same: the first to ask. Knows nothing of compiling.

A claim is a lock on one byte of a file, at a place that is a hash of the name: it ends with its process, however that ends.
"""

import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

try:
    import fcntl

    def _lock_byte(file: int, place: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)

    def _unlock_byte(file: int, place: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)

except ImportError:  # Windows
    msvcrt = import_module("msvcrt")

    def _lock_byte(file: int, place: int) -> None:
        os.lseek(file, place, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

    def _unlock_byte(file: int, place: int) -> None:
        os.lseek(file, place, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)


PATIENCE_SECONDS = 60.0  # for a process that has stopped, or has an error that ours will tell
LOOK_SECONDS = 0.01


class Taken(Exception):
    """Another process has that claim, and this one does not wait."""


class Claims:
    """Claims in a file, whose path is asked for at the first. waits: whether for others; else `Taken` is raised."""

    def __init__(self, path: Callable[[], str]) -> None:
        self._path = path
        self._file = -1
        self.waits = True

    def take(self, name: str) -> bool:
        """Claim a name; whether another process had it meanwhile. Where the file system has no locks, everybody has it."""
        try:
            if self._file < 0:
                self._file = os.open(self._path(), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return False
        deadline, was_taken = time.monotonic() + PATIENCE_SECONDS, False
        while not _lock(self._file, _place(name)):
            if not self.waits:
                raise Taken(name)
            was_taken = True
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        return was_taken

    def give(self, name: str) -> None:
        """It is done."""
        if self._file >= 0:
            with suppress(OSError):
                _unlock_byte(self._file, _place(name))


def _place(name: str) -> int:
    return zlib.crc32(os.path.basename(name).encode()) >> 1


def _lock(file: int, place: int) -> bool:
    """Whether nobody else has that byte; also where locks cannot be had."""
    try:
        _lock_byte(file, place)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True
