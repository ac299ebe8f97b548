"""The store of files: whole or missing, bound to their names, and deleted by last use."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from specdec.runtime import disk_store
from specdec.runtime.disk_store import DiskStore, NewFile
from tests.tools.checkpoint_files import ROOT

NAMES = [f"{letter * 40}.a" for letter in "0123"]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store", ".a", ".b")


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 1000])
def test_content_is_read_as_it_was_written(store: DiskStore, content: bytes) -> None:
    for _ in range(2):
        store.write(NAMES[0], content)
        assert store.read(NAMES[0]) == content
    assert [path.name for path in store.folder.iterdir()] == [NAMES[0]] and store.read(NAMES[1]) is None


def test_damaged_or_renamed_file_counts_as_missing_and_is_deleted(store: DiskStore) -> None:
    store.write(NAMES[0], b"content")
    path = store.folder / NAMES[0]
    sound = path.read_bytes()
    flipped = [sound[:i] + bytes([sound[i] ^ 1]) + sound[i + 1 :] for i in range(len(sound))]
    for data in (*flipped, *(sound[:n] for n in range(len(sound))), sound + b"x"):
        path.write_bytes(data)
        assert store.read(NAMES[0]) is None and not path.exists()
    for name in (NAMES[1], f"{'0' * 40}.b"):
        (store.folder / name).write_bytes(sound)
        assert store.read(name) is None and not (store.folder / name).exists()


@pytest.mark.parametrize("is_unnamed", [False, True])
def test_large_file_appears_when_it_is_published(store: DiskStore, monkeypatch: pytest.MonkeyPatch, is_unnamed: bool) -> None:
    """Also on a system without unnamed files."""
    monkeypatch.setattr(disk_store, "UNNAMED_FILE", disk_store.UNNAMED_FILE if is_unnamed else 0)
    for is_published in (False, True):
        with store.create(NAMES[0]) as file:
            file.write(b"x" * 100)
            assert len([*store.folder.iterdir()]) == (not is_unnamed or not disk_store.UNNAMED_FILE)
            if is_published:
                file.publish()
        assert [path.read_bytes() for path in store.folder.iterdir()] == [b"x" * 100] * is_published


def test_failed_write_leaves_the_older_file(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(NAMES[0], b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for method in ("write", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(NewFile, method, fail)
            with pytest.raises(OSError, match="No space left"):
                store.write(NAMES[0], b"new")
    assert store.read(NAMES[0]) == b"old" and len([*store.folder.iterdir()]) == 1


def test_file_is_closed_before_windows_renames_it(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace
    monkeypatch.setattr(disk_store, "UNNAMED_FILE", 0)
    with store.create(NAMES[0]) as file:
        file.write(b"content")
        monkeypatch.setattr(disk_store.os, "name", "nt")
        monkeypatch.setattr(Path, "replace", lambda self, other: [replace(self, other)] if file._file.closed else 1 / 0)
        file.publish()
        monkeypatch.undo()
        assert file.stat().st_size == 7
    assert [path.name for path in store.folder.iterdir()] == [NAMES[0]]


def test_folder_that_cannot_be_used_is_an_error_of_writing_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        store = DiskStore(folder, ".a")
        assert store.read(NAMES[0]) is None and store.list_entries() == []
        with pytest.raises(OSError, match="file"):
            store.write(NAMES[0], b"x")


@pytest.mark.parametrize("is_private", [False, True])
def test_private_files_are_the_users_alone(tmp_path: Path, is_private: bool) -> None:
    store = DiskStore(tmp_path / "store", ".a", is_private=is_private)
    store.write(NAMES[0], b"x")
    others = [path.stat().st_mode & 0o077 for path in (store.folder, store.folder / NAMES[0])]
    assert (others == [0, 0]) is is_private


def test_the_least_recently_used_entries_are_deleted(store: DiskStore) -> None:
    """The files of an entry go together; files of others and entries of the future are not the last used ones."""
    foreign = store.folder / "notes.a"
    for age, name in enumerate(NAMES):
        for suffix in (".a", ".b"):
            store.write(Path(name).stem + suffix, bytes(1000))
            os.utime(store.folder / (Path(name).stem + suffix), (time.time() - 100 * age - 1,) * 2)
    os.utime(store.folder / NAMES[0], (time.time() + 10**7,) * 2)
    os.utime(store.folder / f"{'0' * 40}.b", (time.time() + 10**7,) * 2)
    foreign.write_bytes(bytes(10**6))
    os.utime(foreign, (1, 1))
    assert [entry.digest[0] for entry in store.list_entries()] == ["0", "3", "2", "1"]
    store.evict(5000)
    assert [entry.digest[0] for entry in store.list_entries()] == ["2", "1"] and foreign.exists()
    store.delete("2" * 40)
    assert sorted(path.name for path in store.folder.iterdir()) == [f"{'1' * 40}.a", f"{'1' * 40}.b", "notes.a"]


def test_what_a_killed_writer_left_is_deleted_and_the_file_of_a_living_one_is_not(store: DiskStore) -> None:
    store.write(NAMES[0], b"x")
    living, dead = (store.folder / f"{NAMES[1]}.{letter * 16}" for letter in "ab")
    for path in (living, dead):
        path.touch()
    os.utime(dead, (time.time() - 2 * disk_store.MAX_TEMPORARY_AGE_S,) * 2)
    assert len(store.list_entries()) == 1
    assert living.exists() and not dead.exists()


def test_mapped_file_that_is_replaced_or_deleted_stays_readable(store: DiskStore) -> None:
    store.write(NAMES[0], b"\1" * 10**5)
    mapped = np.memmap(store.folder / NAMES[0], np.uint8, "r")
    store.write(NAMES[0], b"\2" * 10)
    store.delete("0" * 40)
    assert (mapped[-(10**5) :] == 1).all()


WRITE = """
import sys
from pathlib import Path
from specdec.runtime.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), ".a")
for i in range(200):
    store.write(sys.argv[2], sys.argv[3].encode() * 1000)
    assert store.read(sys.argv[2]) in (b"1" * 1000, b"2" * 1000)
"""


def test_two_writers_never_mix(store: DiskStore) -> None:
    programs = [subprocess.Popen([sys.executable, "-c", WRITE, str(store.folder), NAMES[0], number], cwd=ROOT) for number in "12"]
    assert [program.wait() for program in programs] == [0, 0]
    assert [path.name for path in store.folder.iterdir()] == [NAMES[0]]
