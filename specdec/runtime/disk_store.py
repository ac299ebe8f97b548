"""Folders of files that outlive their process: machine code, packed weights, calibration, and prompts.

A file appears as a whole or not at all, also if its writer is killed. Its name is a digest of what its content depends on, and
its checksum covers the name too. So a file that is damaged, cut off, or renamed to another's name counts as missing: what a store
holds can be computed again. The files of one digest that differ only in their suffix are an entry. If a store becomes too large,
the least recently used entries are deleted. Files are only replaced or deleted, never truncated, which would kill the processes
that map them.
"""

import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import NamedTuple

UNNAMED_FILE = getattr(os, "O_TMPFILE", 0)  # Linux
MAGIC = b"specdec2"
CHECKSUM_BYTES = 16
CHUNK_BYTES = 1 << 26  # written at once; Ctrl-C works in between
MAX_CLOCK_SKEW_S = 3600.0  # of another machine; a file from later than that was written before a clock was set back
MAX_TEMPORARY_AGE_S = 3600.0  # since the last write; then its writer has been killed
LOCK_TIMEOUT_S = 60.0  # for a process that was stopped, or has an error that this one will report
POLL_INTERVAL_S = 0.01

try:
    import fcntl

    LOCK, UNLOCK = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

    def _change_lock(file: int, mode: int, offset: int) -> None:
        fcntl.lockf(file, mode, 1, offset)

except ImportError:  # Windows
    msvcrt = import_module("msvcrt")
    LOCK, UNLOCK = msvcrt.LK_NBLCK, msvcrt.LK_UNLCK

    def _change_lock(file: int, mode: int, offset: int) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, mode, 1)


class StoreEntry(NamedTuple):
    """The files of a digest in a store: the digest, their total size, and their last use in seconds since the epoch."""

    digest: str
    n_bytes: int
    last_used: float


def compute_checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the first CHECKSUM_BYTES bytes of the SHA-256 digest of several buffers and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[:CHECKSUM_BYTES]


class NewFile(AbstractContextManager["NewFile"]):
    """A file that is being written: it gets its name by `publish`, and leaves nothing when the context ends without that.

    Before, it has a temporary name, and `DiskStore.list_entries` deletes it later if its process is killed. On Linux a large file
    has no name, so it vanishes with its process.
    """

    def __init__(self, path: Path, mode: int, is_large: bool = False) -> None:
        """Create the file in an existing folder; raise OSError if that is not possible.

        Args:
            path: Path that `publish` gives it.
            mode: Permissions before the umask.
            is_large: Whether what a killed process leaves is worth the care.
        """
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
        unnamed_file = _open_unnamed(path.parent, mode) if is_large else None
        self._has_name = unnamed_file is None
        self._file = unnamed_file or FileIO(os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w")

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise OSError if the disk is full."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._file.write(rest[:CHUNK_BYTES]) :]

    def sync(self) -> None:
        """Wait until the disk has all bytes."""
        os.fsync(self._file.fileno())

    def stat(self) -> os.stat_result:
        """Return the status of the file."""
        return os.stat(self._path) if self._file.closed else os.fstat(self._file.fileno())

    def publish(self) -> None:
        """Give the file its name, in place of an older file; raise OSError if that is not possible."""
        if not self._has_name:
            os.link(f"/proc/self/fd/{self._file.fileno()}", self._temporary, src_dir_fd=0)  # that argument follows the link
            self._has_name = True
        if os.name == "nt":  # Windows does not rename open files
            self._file.close()
        self._temporary.replace(self._path)
        self._has_name = False

    def close(self) -> None:
        """Close the file, and delete it if it is not published."""
        self._file.close()
        if self._has_name:
            with suppress(OSError):
                self._temporary.unlink()

    def __exit__(self, *error: object) -> None:
        """Close the file, and delete it if it is not published."""
        self.close()


def _open_unnamed(folder: Path, mode: int) -> FileIO | None:
    """Create a file without a name in a folder; return None if the system or the file system has no such files."""
    if not UNNAMED_FILE or not os.path.exists("/proc/self/fd"):
        return None
    with suppress(OSError):
        return FileIO(os.open(folder, UNNAMED_FILE | os.O_RDWR, mode), "w")
    return None


class DiskStore:
    """A folder of files, which is created when the first one is written. Others may have files in it.

    Attributes:
        folder: The folder.
    """

    def __init__(
        self,
        folder: Path,
        *suffixes: str,
        is_private: bool = True,
        checksum: Callable[[Iterable[bytes | memoryview]], bytes] = compute_checksum,
    ) -> None:
        """Describe a store.

        Args:
            folder: The folder.
            suffixes: Suffixes of its files, such as ".weights".
            is_private: Whether only the user can read the files.
            checksum: Function that returns CHECKSUM_BYTES bytes for several buffers.
        """
        self.folder, self._checksum = folder, checksum
        self._folder_mode, self._file_mode = (0o700, 0o600) if is_private else (0o777, 0o666)
        self._suffixes = suffixes
        endings = "|".join(map(re.escape, suffixes))
        self._name_pattern = re.compile(rf"([0-9a-f]{{24,}})(?:{endings})")
        self._temporary_pattern = re.compile(rf".*(?:{endings})\.[0-9a-f]{{16}}")

    def read(self, name: str) -> memoryview | None:
        """Return the content of a file, or None if it is missing or cannot be read; a damaged file is deleted."""
        path = self.folder / name
        try:
            data = memoryview(path.read_bytes())
        except OSError:
            return None
        head, content = data[: len(MAGIC) + CHECKSUM_BYTES], data[len(MAGIC) + CHECKSUM_BYTES :]
        if head == MAGIC + self._checksum([name.encode(), content]):
            return content
        with suppress(OSError):
            path.unlink()
        return None

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file with its checksum, in place of an older one at once; raise OSError if that is not possible."""
        with self.create(name, is_large=False) as file:
            file.write(MAGIC + self._checksum([name.encode(), content]))
            file.write(content)
            file.publish()

    def create(self, name: str, is_large: bool = True) -> NewFile:
        """Create a file that the caller writes, with a checksum of its own; raise OSError if that is not possible."""
        self.folder.mkdir(mode=self._folder_mode, parents=True, exist_ok=True)
        return NewFile(self.folder / name, self._file_mode, is_large)

    def list_entries(self) -> list[StoreEntry]:
        """Return the entries, the least recently used one first, after deleting what killed writers have left."""
        found = dict[str, StoreEntry]()
        now = time.time()
        for path in self._list_files():
            with suppress(OSError):
                stat = path.stat()
                if self._temporary_pattern.fullmatch(path.name) and stat.st_mtime < now - MAX_TEMPORARY_AGE_S:
                    path.unlink()
                elif match := self._name_pattern.fullmatch(path.name):
                    used = stat.st_mtime if stat.st_mtime < now + MAX_CLOCK_SKEW_S else 0.0
                    entry = found.get(match[1], StoreEntry(match[1], 0, 0.0))
                    found[match[1]] = StoreEntry(match[1], entry.n_bytes + stat.st_size, max(entry.last_used, used))
        return sorted(found.values(), key=lambda entry: entry.last_used)

    def _list_files(self) -> list[Path]:
        with suppress(OSError):
            return [*self.folder.iterdir()]
        return []

    def evict(self, max_bytes: float) -> None:
        """Delete the least recently used entries until the others take at most max_bytes."""
        entries = self.list_entries()
        excess = sum(entry.n_bytes for entry in entries) - max_bytes
        for entry in entries:
            if excess <= 0:
                break
            self.delete(entry.digest)
            excess -= entry.n_bytes

    def delete(self, digest: str) -> None:
        """Delete the files of a digest, ignoring errors; processes that map one keep its pages."""
        for suffix in self._suffixes:
            with suppress(OSError):
                (self.folder / (digest + suffix)).unlink()


class ProcessLocks:
    """Locks between processes, by name, in one file. A lock is on one byte, at an offset that is a hash of its name.

    A lock ends with its process, however that ends.

    Attributes:
        is_blocking: Whether `acquire` waits while another process holds a lock; else it raises `BlockingIOError`.
    """

    def __init__(self, path: Callable[[], str]) -> None:
        """Create the locks; `path` returns the path of the lock file and is called on first use."""
        self._path = path
        self._file = -1
        self.is_blocking = True

    def acquire(self, name: str) -> bool:
        """Take a lock for this process, and return whether another process held it meanwhile.

        Waits up to LOCK_TIMEOUT_S for the other process, then continues without the lock. Returns False at once, without a lock,
        if the file cannot be opened or the file system has no locks.

        Raises:
            BlockingIOError: Another process holds the lock, and `is_blocking` is False.
        """
        try:
            if self._file < 0:
                self._file = os.open(self._path(), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return False
        deadline, was_taken = time.monotonic() + LOCK_TIMEOUT_S, False
        while not self._try_lock(name):
            if not self.is_blocking:
                raise BlockingIOError(name)
            was_taken = True
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        return was_taken

    def release(self, name: str) -> None:
        """Release the lock that `acquire` took, if any."""
        if self._file >= 0:
            with suppress(OSError):
                _change_lock(self._file, UNLOCK, _get_lock_offset(name))

    def _try_lock(self, name: str) -> bool:
        """Take a lock without waiting, and return whether that worked; True also if the file system has no locks."""
        try:
            _change_lock(self._file, LOCK, _get_lock_offset(name))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True


def _get_lock_offset(name: str) -> int:
    return zlib.crc32(name.encode()) >> 1
