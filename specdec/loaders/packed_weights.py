"""A cache of packed weights on disk, from which a model starts without being read and packed again.

A model of 14B in Q4_K_M has its first token 1.2 s after the command, and packing it would take a core 3.5 s.

`KEY.weights` holds the matrices of a model as the kernels read them, then its vectors. Later processes map the file read-only, so
they share its pages, and the system may drop them. `KEY.json` describes the file. The key is a digest of everything that packing
depends on: the identity of the model's files, the config, the weight formats, the code that packs, and the CPU. The description
is a file of a `DiskStore`, so it belongs to its key.

A file that changed in any way counts as missing. To notice that without reading gigabytes, `KEY.json` records the identity of
`KEY.weights`, which includes its status change time (ctime). Writing, copying and renaming change that time, and no program can
set it.
"""

import hashlib
import json
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from specdec.argument_checks import CheckpointWarning, JSONDict, check_path
from specdec.layers.weights import Weights
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.model_file import list_shards
from specdec.model import get_architecture
from specdec.quant import WeightFormat
from specdec.runtime import code_cache
from specdec.runtime.disk_store import DiskStore, NewFile
from specdec.runtime.simd import CPU_FEATURES, LINE_BYTES, Float32, round_up

ON, OFF = "on", "off"
WEIGHTS_SUFFIX, INFO_SUFFIX = ".weights", ".json"
MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf")  # of files that decide what the weights are
MAX_FREE_SHARE = 0.5  # part of the free space, the cache's own files included, that the cache may take
MIN_AGE_S = 2.0  # a file that changed later might change again without getting another time
MAPPED_CHUNK_BYTES = 1 << 26  # mapped at once; Ctrl-C works in between
MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it
# Folders and files of the package that decide how weights are packed
_SOURCES = ("families", "heads", "layers", "loaders", "model", "quant", "runtime", "kernels.py", "model_config.py")


class PackedModel(NamedTuple):
    """A file of packed weights: its path, the path of the model, its size, and its last use in seconds since the epoch."""

    path: Path
    model: str
    n_bytes: int
    last_used: float


class PackedWeightsCache:
    """A folder of packed weights, which is created when the first file is written.

    Warns with CheckpointWarning when weights are kept, which takes space on the user's disk, and when they cannot be.

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        """Describe the cache in a folder."""
        self.folder = folder
        self._store = DiskStore(folder, INFO_SUFFIX, WEIGHTS_SUFFIX)

    def load(
        self,
        checkpoint: Checkpoint,
        weight_format: WeightFormat | None,
        progress: Callable[[float], object] = lambda share: None,
    ) -> Weights | None:
        """Map the packed weights of a checkpoint and return them, or None if the cache does not hold them or they have changed.

        Marks the file as used now.

        Args:
            checkpoint: The model's config and tensors.
            weight_format: The format of its float weights; None: as in the file.
            progress: Callback that gets the fraction done.
        """
        key = _make_key(checkpoint, weight_format)
        info = self._read_info(key)
        if not info:
            return None
        try:
            with (self.folder / f"{key}{WEIGHTS_SUFFIX}").open("rb") as file:
                identity = _get_identity(os.fstat(file.fileno()))
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: the file is empty
            return None
        if info["identity"] != identity:
            return None
        plan = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors, weight_format)
        weights = plan.arrange(_split(memory, info["sizes"]), info["formats"])
        _populate(memory, progress)
        with suppress(OSError):
            os.utime(self.folder / f"{key}{INFO_SUFFIX}")
        return weights

    def open_writer(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> "PackedWeightsWriter":
        """Return a writer for weights that are about to be packed, after deleting old files of the cache if space is short.

        The writer keeps nothing if there is no room, or if a file of the model has changed in the last MIN_AGE_S seconds.

        Args:
            checkpoint: The model's config and tensors.
            weight_format: As in `load`.
        """
        architecture = get_architecture(checkpoint.config)
        n_bytes = architecture.plan_weights(checkpoint.config, checkpoint.tensors).estimate_bytes(weight_format)
        writer = PackedWeightsWriter(self, checkpoint, weight_format)
        newest = max(_get_identity(path.stat())[-1] for path in _list_model_files(checkpoint.path))
        if time.time_ns() - newest > MIN_AGE_S * 1e9:
            try:
                writer.file = self._create_file(writer.key, n_bytes)
            except OSError as error:
                writer.fail(error)
        return writer

    def list_models(self) -> list[PackedModel]:
        """Return the files of the cache, the least recently used one first."""
        found = list[PackedModel]()
        for key, n_bytes, last_used in self._store.list_entries():
            model = self._read_info(key).get("model", "")
            found.append(PackedModel(self.folder / f"{key}{WEIGHTS_SUFFIX}", model, n_bytes, last_used))
        return found

    def delete(self, packed: PackedModel) -> None:
        """Delete a file of packed weights, ignoring errors; processes that map it keep its pages."""
        self._store.delete(packed.path.stem)

    def _create_file(self, key: str, n_bytes: int) -> NewFile | None:
        """Create the file of weights of a key, after deleting the least recently used ones until n_bytes more may be written.

        Returns None, with a warning and without deleting any, if n_bytes exceed even the limit of an empty cache.

        Raises:
            OSError: The file cannot be created.
        """
        file = self._store.create(f"{key}{WEIGHTS_SUFFIX}")
        n_used = sum(entry.n_bytes for entry in self._store.list_entries())
        limit = MAX_FREE_SHARE * (shutil.disk_usage(self.folder).free + n_used)
        if n_bytes > limit:
            file.close()
            problem = f"{n_bytes / 1e9:.1f} GB are more than half of the free space in {self.folder}"
            _warn(f"not keeping the packed weights: {problem}")
            return None
        self._store.evict(limit - n_bytes)
        return file

    def _read_info(self, key: str) -> JSONDict:
        """Return the description of a file of packed weights; {} if it is missing or damaged."""
        content = self._store.read(f"{key}{INFO_SUFFIX}")
        info: JSONDict = json.loads(bytes(content)) if content else {}
        return info

    def write_info(self, key: str, info: JSONDict) -> None:
        """Write the description of a file of packed weights; raise OSError if that is not possible."""
        self._store.write(f"{key}{INFO_SUFFIX}", json.dumps(info).encode())


class PackedWeightsWriter:
    """A context in which `add` keeps packed arrays in a file, which appears when the context ends without an exception.

    An error of the disk is reported, and nothing is kept.

    Attributes:
        key: Key of the weights in the cache.
        file: The file; None if nothing is kept.
    """

    def __init__(self, cache: PackedWeightsCache, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> None:
        """Create a writer; see `PackedWeightsCache.open_writer` for the arguments."""
        self._cache, self._checkpoint, self._weight_format = cache, checkpoint, weight_format
        self.key = _make_key(checkpoint, weight_format)
        self.file: NewFile | None = None
        self._sizes, self._array_formats = list[int](), list[str]()

    def add(self, array: Float32, format_name: str = "") -> None:
        """Write the next array: the panels of a matrix with the name of their weight format, or a vector.

        Does nothing if there is no file. After an error of the disk, warns and drops the file.
        """
        if not self.file:
            return
        try:
            self.file.write(array.reshape(-1).view(np.uint8).data)
            self.file.write(bytes(_pad_to_cache_line(array.nbytes) - array.nbytes))
        except OSError as error:
            self.fail(error)
            return
        self._sizes.append(array.nbytes)
        self._array_formats.append(format_name)

    def __enter__(self) -> "PackedWeightsWriter":
        """Return the writer."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the file, or delete it after an exception or if the model's files have changed."""
        if not self.file:
            return
        try:
            if error_type is None and self.key == _make_key(self._checkpoint, self._weight_format):
                self._publish(self.file)
        except OSError as disk_error:
            self.fail(disk_error)
        finally:
            self._close()

    def _publish(self, file: NewFile) -> None:
        """Give the file its name, write its description, and warn that the disk now holds it."""
        file.sync()
        file.publish()
        info = {
            "model": str(self._checkpoint.path.absolute()),
            "formats": self._array_formats,
            "sizes": self._sizes,
            "identity": _get_identity(file.stat()),
        }
        self._cache.write_info(self.key, info)
        _warn(
            f"kept the packed weights ({sum(self._sizes) / 1e9:.1f} GB) in {self._cache.folder} for a quicker start; "
            "--weight-cache off keeps none"
        )

    def fail(self, error: OSError) -> None:
        """Drop the file, and warn that the packed weights cannot be kept."""
        self._close()
        _warn(f"cannot keep the packed weights in {self._cache.folder}: {error.strerror or error}")

    def _close(self) -> None:
        if self.file:
            self.file.close()
            self.file = None


def open_packed_weights(packed: str | os.PathLike[str]) -> PackedWeightsCache | None:
    """Return the cache that an option names: "auto" or "on" (in the default folder), or a folder; None for "off" or no folder."""
    if packed == OFF:
        return None
    folder = get_default_folder() if packed in ("auto", ON) else Path(check_path("packed", packed))
    return PackedWeightsCache(folder) if folder else None


def delete_packed(*models: Path) -> list[PackedModel]:
    """Delete the packed weights of models, or all in the default folder, and return them."""
    cache = open_packed_weights(ON)
    if not cache:
        return []
    found = [each for each in cache.list_models() if not models or Path(each.model) in models]
    for each in found:
        cache.delete(each)
    return found


def get_default_folder() -> Path | None:
    """Return the folder of packed weights, next to the cached machine code; None if no folder is writable."""
    folder = code_cache.get_cache_dir()
    return Path(folder).parent / "packed" if folder else None


def _warn(line: str) -> None:
    warnings.warn(line, CheckpointWarning, stacklevel=2)


def _make_key(checkpoint: Checkpoint, weight_format: WeightFormat | None) -> str:
    """Return the digest of everything that the packed weights of a checkpoint depend on."""
    identities = [(path.name, *_get_identity(path.stat())) for path in _list_model_files(checkpoint.path)]
    config, tensors = checkpoint.config, checkpoint.tensors
    names = get_architecture(config).plan_weights(config, tensors, weight_format).format_names
    key = (_hash_sources(), CPU_FEATURES, config, names, identities)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:40]


def _hash_sources() -> str:
    paths = [code_cache.PACKAGE_DIR / name for name in _SOURCES]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _list_model_files(path: Path) -> list[Path]:
    """Return the files from which a model's config and tensors are read, in order of their names."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
    return list_shards(path)


def _get_identity(stat: os.stat_result) -> list[int]:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _split(memory: mmap.mmap, sizes: Sequence[int]) -> list[Float32]:
    """Return the arrays (n,) of the given sizes in bytes that lie behind each other in a file, padded to cache lines."""
    starts = accumulate(map(_pad_to_cache_line, sizes), initial=0)
    return [np.frombuffer(memory, np.float32, n // 4, start) for n, start in zip(sizes, starts, strict=False)]


def _pad_to_cache_line(n_bytes: int) -> int:
    return int(round_up(n_bytes, LINE_BYTES))


def _populate(memory: mmap.mmap, progress: Callable[[float], object]) -> None:
    """Map all pages of a file, and read those that are not in memory, with progress; a first pass would do it in silence."""
    for start in range(0, len(memory), MAPPED_CHUNK_BYTES):
        try:
            memory.madvise(MADV_POPULATE_READ, start, min(MAPPED_CHUNK_BYTES, len(memory) - start))
        except (AttributeError, OSError, ValueError):
            return
        progress(start / len(memory))
