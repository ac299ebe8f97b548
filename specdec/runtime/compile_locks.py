"""Locks between processes that compile the same functions: the first compiles, the others wait.

A compile lock is a lock on one byte of a file, at an offset that is a hash of the function's name. It ends with its process,
however that ends.
"""

import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

try:
    import fcntl

    def _lock_byte(file: int, offset: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)

    def _unlock_byte(file: int, offset: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)

except ImportError:  # Windows
    msvcrt = import_module("msvcrt")

    def _lock_byte(file: int, offset: int) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

    def _unlock_byte(file: int, offset: int) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)


LOCK_TIMEOUT_S = 60.0  # for a process that was stopped, or has an error that this one will report
POLL_INTERVAL_S = 0.01


class AlreadyCompilingError(Exception):
    """Raised if another process holds the compile lock of a function and `CompileLocks.is_blocking` is False."""


class CompileLocks:
    """Locks between processes, one per function name, so that only one process compiles a function.

    Attributes:
        is_blocking: Whether `acquire` waits while another process holds a lock; else it raises `AlreadyCompilingError`.
    """

    def __init__(self, path: Callable[[], str]) -> None:
        """Create the locks; `path` returns the path of the lock file and is called on first use."""
        self._path = path
        self._file = -1
        self.is_blocking = True

    def acquire(self, name: str) -> bool:
        """Lock the name of a function for this process, and return whether another process held that lock meanwhile.

        Waits up to LOCK_TIMEOUT_S for the other process, then continues without the lock. Returns False at once, without a lock,
        if the file cannot be opened or the file system has no locks.

        Raises:
            AlreadyCompilingError: Another process holds the lock, and `is_blocking` is False.
        """
        try:
            if self._file < 0:
                self._file = os.open(self._path(), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return False
        deadline, was_taken = time.monotonic() + LOCK_TIMEOUT_S, False
        while not _try_lock(self._file, _get_lock_offset(name)):
            if not self.is_blocking:
                raise AlreadyCompilingError(name)
            was_taken = True
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        return was_taken

    def release(self, name: str) -> None:
        """Release the lock that `acquire` took for the name of a function, if any."""
        if self._file >= 0:
            with suppress(OSError):
                _unlock_byte(self._file, _get_lock_offset(name))


def _get_lock_offset(name: str) -> int:
    return zlib.crc32(os.path.basename(name).encode()) >> 1


def _try_lock(file: int, offset: int) -> bool:
    """Lock one byte of an open file without waiting, and return whether it worked; True also if the file system has no locks."""
    try:
        _lock_byte(file, offset)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True
