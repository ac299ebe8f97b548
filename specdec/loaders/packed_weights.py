"""A cache of packed weights on disk, from which a model starts without being read and packed again.

`KEY.weights` holds the matrices of a model as the kernels read them, then its vectors. Later processes map the file read-only, so
they share its pages, and the system may drop them. `KEY.json` describes the file. The key is a digest of everything that packing
depends on: the identity of the model's files, the config, the possible weight formats, the code that packs, and the CPU.

A file that changed in any way counts as missing. To notice that without reading gigabytes, `KEY.json` records the identity of
`KEY.weights`, which includes its status change time (ctime). Writing, copying and renaming change that time, and no program can
set it. If the identity differs, as in a copied folder, the contents are compared with their checksum. Files are only replaced or
deleted, never truncated, which would kill the processes that map them.
"""

import atexit
import hashlib
import json
import mmap
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from specdec.argument_checks import CheckpointWarning, check_path
from specdec.layers.architecture import Weights
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.model_file import list_shard_names
from specdec.loaders.model_loader import list_matrix_formats
from specdec.model import get_architecture
from specdec.quant import WeightFormat
from specdec.runtime import code_cache
from specdec.runtime.matmul_tile import LINE_BYTES
from specdec.runtime.memory import checksum
from specdec.runtime.simd import CPU_FEATURES, Float32, round_up

ON, OFF = "on", "off"
UNNAMED_FILE = getattr(os, "O_TMPFILE", 0)  # Linux
FORMAT_VERSION = 1
WEIGHTS_SUFFIX, INFO_SUFFIX = ".weights", ".json"
DIGEST_CHARACTERS = 40
WEIGHTS_PATTERN = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}{WEIGHTS_SUFFIX}")
TEMPORARY_PATTERN = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}\.[0-9a-f]{{16}}")  # while a file is written
MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf")  # of files that decide what the weights are
MAX_FREE_SHARE = 0.5  # part of the free space, the cache's own files included, that the cache may take
MIN_AGE_S = 2.0  # a file that changed later might change again without getting another time
CHUNK_BYTES = 1 << 26  # written or mapped at once; Ctrl-C works in between
MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it
# Folders and files of the package that decide how weights are packed
_SOURCES = ("families", "heads", "layers", "loaders", "model", "quant", "runtime", "kernels.py", "model_config.py")

try:
    import fcntl

    def _lock(file: FileIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

except ImportError:  # Windows, where nobody can delete an open file

    def _lock(file: FileIO) -> None:
        pass


class PackedFile(NamedTuple):
    """A file of packed weights: its path, the path of the model, its size, and its last use in seconds since the epoch."""

    path: Path
    model: str
    n_bytes: int
    last_used: float


@dataclass(frozen=True)
class PackedWeightsCache:
    """A folder of packed weights, which is created when the first file is written.

    Warns with CheckpointWarning when weights are kept, which takes space on the user's disk, and when they cannot be.
    """

    folder: Path

    def load(
        self,
        checkpoint: Checkpoint,
        formats: Sequence[WeightFormat | None],
        progress: Callable[[float], object] = lambda share: None,
    ) -> Weights | None:
        """Map the packed weights of a checkpoint and return them, or None if the cache does not hold them or they have changed.

        Marks the file as used now.

        Args:
            checkpoint: The model's config and tensors.
            formats: The weight formats that the model may have been packed in, as in `Loader.list_weight_formats`.
            progress: Callback that gets the fraction done.
        """
        info_path = self.folder / f"{_make_key(checkpoint, formats)}{INFO_SUFFIX}"
        if not (info := _read_info(info_path)):
            return None
        try:
            with info_path.with_suffix(WEIGHTS_SUFFIX).open("rb") as file:
                identity = _get_identity(os.fstat(file.fileno()))
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: the file is empty
            return None
        if len(memory) != sum(map(_pad_to_cache_line, info["sizes"])):
            return None
        arrays = _split(memory, info["sizes"])
        if info["identity"] != identity:
            checksums = list[bytes]()
            for i, array in enumerate(arrays):
                progress(i / len(arrays))
                checksums.append(checksum([array]))
            if _combine(checksums) != info["checksum"]:
                return None
            with suppress(OSError):
                _write_info(info_path, info | {"identity": identity})
        weights = get_architecture(checkpoint.config).arrange(
            checkpoint.config, checkpoint.tensors, formats[info["choice"]], arrays, info["formats"]
        )
        _populate(memory, progress)
        with suppress(OSError):
            os.utime(info_path)
        return weights

    def open_writer(
        self, checkpoint: Checkpoint, formats: Sequence[WeightFormat | None], weight_format: WeightFormat | None
    ) -> "PackedWeightsWriter":
        """Return a writer for weights that are about to be packed, after deleting old files of the cache if space is short.

        The writer keeps nothing if there is no room, or if a file of the model has changed in the last MIN_AGE_S seconds.

        Args:
            checkpoint: The model's config and tensors.
            formats: As in `load`.
            weight_format: The one of them in which the weights are packed.
        """
        architecture = get_architecture(checkpoint.config)
        n_bytes = architecture.estimate_bytes(checkpoint.config, checkpoint.tensors, weight_format)
        writer = PackedWeightsWriter(self, checkpoint, formats, weight_format)
        newest = max(_get_identity(path.stat())[-1] for path in _list_model_files(checkpoint.path))
        if time.time_ns() - newest > MIN_AGE_S * 1e9:
            writer.create_file(n_bytes)
        return writer

    def list_files(self) -> list[PackedFile]:
        """Return the files of the cache, the least recently used one first."""
        found = list[PackedFile]()
        for path in _find(self.folder, WEIGHTS_PATTERN):
            info_path = path.with_suffix(INFO_SUFFIX)
            with suppress(OSError):
                model = _read_info(info_path).get("model", "")
                found.append(PackedFile(path, model, path.stat().st_size, (info_path if model else path).stat().st_mtime))
        return sorted(found, key=lambda each: each.last_used)

    def make_room(self, n_bytes: int) -> bool:
        """Delete the least recently used files until n_bytes more may be written, and return True.

        Returns False, without deleting any, if n_bytes exceed even the limit of an empty cache. The temporary files of processes
        that have ended are deleted in any case.

        Raises:
            OSError: The free space of the disk cannot be read.
        """
        for path in _find(self.folder, TEMPORARY_PATTERN):
            with suppress(OSError), FileIO(path) as file:
                _lock(file)  # fails while the process lives that writes it
                path.unlink()
        files = self.list_files()
        n_used = sum(each.n_bytes for each in files)
        limit = MAX_FREE_SHARE * (shutil.disk_usage(self.folder).free + n_used)
        if n_bytes > limit:
            return False
        for each in files:
            if n_used + n_bytes > limit:
                delete_packed_file(each.path)
                n_used -= each.n_bytes
        return True


class PackedWeightsWriter:
    """A context in which `add` keeps packed arrays in a file, which appears when the context ends without an exception.

    An error of the disk is reported, and nothing is kept.
    """

    def __init__(
        self,
        cache: PackedWeightsCache,
        checkpoint: Checkpoint,
        formats: Sequence[WeightFormat | None],
        weight_format: WeightFormat | None,
    ) -> None:
        """Create a writer; see `PackedWeightsCache.open_writer` for the arguments."""
        self._cache, self._checkpoint, self._formats, self._weight_format = cache, checkpoint, formats, weight_format
        self._key = _make_key(checkpoint, formats)
        self._path = _make_temporary_path(cache.folder / self._key)
        self._file: FileIO | None = None
        self._sizes, self._array_formats, self._checksums = list[int](), list[str](), list[bytes]()

    def create_file(self, n_bytes: int) -> None:
        """Create a temporary file for n_bytes; without room for them, or after an error of the disk, warn and keep nothing."""
        folder = self._cache.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._cache.make_room(n_bytes):
                self._file = _create_unnamed_file(folder)
                if not self._file:
                    self._file = FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w")
                    _unfinished_files.add(self._path)
                _lock(self._file)
            else:
                problem = f"{n_bytes / 1e9:.1f} GB are more than half of the free space in {folder}"
                _warn(f"not keeping the packed weights: {problem}")
        except OSError as error:
            self._fail(error)

    def add(self, array: Float32, format_name: str = "") -> None:
        """Write the next array: the panels of a matrix with the name of their weight format, or a vector.

        Does nothing if there is no file. After an error of the disk, warns and drops the file.
        """
        if not self._file:
            return
        padding = bytes(_pad_to_cache_line(array.nbytes) - array.nbytes)
        try:
            for data in (array.reshape(-1).view(np.uint8).data, memoryview(padding)):
                while data:
                    data = data[self._file.write(data[:CHUNK_BYTES]) :]
        except OSError as error:
            self._fail(error)
            return
        self._sizes.append(array.nbytes)
        self._array_formats.append(format_name)
        self._checksums.append(checksum([array]))

    def __enter__(self) -> "PackedWeightsWriter":
        """Return the writer."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the file, or delete it after an exception or if the model's files have changed."""
        if not self._file:
            return
        try:
            if error_type is None and self._key == _make_key(self._checkpoint, self._formats):
                self._publish(self._file)
        except OSError as disk_error:
            self._fail(disk_error)
        finally:
            self._discard()

    def _publish(self, file: FileIO) -> None:
        """Give the temporary file its final name, write its description, and warn that the disk now holds it."""
        info_path = self._cache.folder / f"{self._key}{INFO_SUFFIX}"
        os.fsync(file.fileno())
        if self._path not in _unfinished_files:
            _unfinished_files.add(self._path)
            os.link(f"/proc/self/fd/{file.fileno()}", self._path, src_dir_fd=0)  # that argument makes it follow the link
        self._path.replace(info_path.with_suffix(WEIGHTS_SUFFIX))
        info = {
            "model": str(self._checkpoint.path.absolute()),
            "choice": self._formats.index(self._weight_format),
            "formats": self._array_formats,
            "sizes": self._sizes,
            "checksum": _combine(self._checksums),
            "identity": _get_identity(os.fstat(file.fileno())),
        }
        _write_info(info_path, info)
        _warn(
            f"kept the packed weights ({sum(self._sizes) / 1e9:.1f} GB) in {self._cache.folder} for a quicker start; "
            "--weight-cache off keeps none"
        )

    def _fail(self, error: OSError) -> None:
        """Drop the file, and warn that the packed weights cannot be kept."""
        self._discard()
        _warn(f"cannot keep the packed weights in {self._cache.folder}: {error.strerror or error}")

    def _discard(self) -> None:
        """Close the file, and delete it if it has its temporary name."""
        if self._file:
            self._file.close()
            self._file = None
        with suppress(OSError):
            self._path.unlink()
        _unfinished_files.discard(self._path)


def open_packed_weights(packed: str | os.PathLike[str]) -> PackedWeightsCache | None:
    """Return the cache that an option names: "auto" or "on" (in the default folder), or a folder; None for "off" or no folder."""
    if packed == OFF:
        return None
    folder = get_default_folder() if packed in ("auto", ON) else Path(check_path("packed", packed))
    return PackedWeightsCache(folder) if folder else None


def get_default_folder() -> Path | None:
    """Return the folder of packed weights, next to the cached machine code; None if no folder is writable."""
    folder = code_cache.get_cache_dir()
    return Path(folder).parent / "packed" if folder else None


def _create_unnamed_file(folder: Path) -> FileIO | None:
    """Create a file without a name in a folder, which vanishes if the process is killed; return None if the system has none."""
    if not UNNAMED_FILE:
        return None
    try:
        file = FileIO(os.open(folder, UNNAMED_FILE | os.O_RDWR, 0o600), "w")
    except OSError:  # the file system has no such files
        return None
    if Path(f"/proc/self/fd/{file.fileno()}").exists():
        return file
    file.close()
    return None


_unfinished_files = set[Path]()


def delete_unfinished_files() -> None:
    """Delete the temporary files that this process is still writing; runs when the process ends."""
    for path in [*_unfinished_files]:
        with suppress(OSError):
            path.unlink()


atexit.register(delete_unfinished_files)


def delete_packed_file(path: Path) -> None:
    """Delete a file of packed weights and its description, ignoring errors; processes that map it keep their pages."""
    for each in (path.with_suffix(INFO_SUFFIX), path):
        with suppress(OSError):
            each.unlink()


def _warn(line: str) -> None:
    warnings.warn(line, CheckpointWarning, stacklevel=2)


def _make_key(checkpoint: Checkpoint, formats: Sequence[WeightFormat | None]) -> str:
    """Return the digest of everything that the packed weights of a checkpoint depend on."""
    identities = [(path.name, *_get_identity(path.stat())) for path in _list_model_files(checkpoint.path)]
    matrix_formats = [list_matrix_formats(checkpoint, each) for each in formats]
    key = (FORMAT_VERSION, _hash_sources(), CPU_FEATURES, checkpoint.config, matrix_formats, identities)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _hash_sources() -> str:
    paths = [code_cache.PACKAGE_DIR / name for name in _SOURCES]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _list_model_files(path: Path) -> list[Path]:
    """Return the files from which a model's config and tensors are read, in order of their names."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
    shards = (path.with_name(name) for name in list_shard_names(path.name))
    return [path, *(shard for shard in shards if shard != path and shard.exists())]


def _get_identity(stat: os.stat_result) -> list[int]:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _combine(checksums: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"".join(checksums), digest_size=16).hexdigest()


def _split(memory: mmap.mmap, sizes: Sequence[int]) -> list[Float32]:
    """Return the arrays (n,) of the given sizes in bytes that lie behind each other in a file, padded to cache lines."""
    starts = accumulate(map(_pad_to_cache_line, sizes), initial=0)
    return [np.frombuffer(memory, np.float32, n // 4, start) for n, start in zip(sizes, starts, strict=False)]


def _pad_to_cache_line(n_bytes: int) -> int:
    return int(round_up(n_bytes, LINE_BYTES))


def _populate(memory: mmap.mmap, progress: Callable[[float], object]) -> None:
    """Map all pages of a file, and read those that are not in memory, with progress; a first pass would do it in silence."""
    for start in range(0, len(memory), CHUNK_BYTES):
        try:
            memory.madvise(MADV_POPULATE_READ, start, min(CHUNK_BYTES, len(memory) - start))
        except (AttributeError, OSError, ValueError):
            return
        progress(start / len(memory))


def _read_info(path: Path) -> dict[str, Any]:
    """Return the description of a file of packed weights; {} if it is missing or damaged."""
    with suppress(OSError):
        digest, _, text = path.read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() == digest:
            info: dict[str, Any] = json.loads(text)
            return info
    return {}


def _write_info(path: Path, info: dict[str, Any]) -> None:
    """Write the description of a file of packed weights, in place of an older one at once.

    Raises:
        OSError: The file cannot be written.
    """
    text = json.dumps(info).encode()
    temporary = _make_temporary_path(path)
    try:
        with FileIO(temporary, "x") as file:
            _lock(file)
            file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _make_temporary_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.{os.urandom(8).hex()}")


def _find(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a folder whose names match a pattern; a folder of the user's may hold others."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    return []
