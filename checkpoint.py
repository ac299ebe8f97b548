"""Bytes of a llama2.c checkpoint file to a `Config` and tensors. Every check of a file is here; knows nothing of arithmetic.

Layouts as in karpathy/llama2.c: run.c reads version 0, export.py writes versions 0 to 2. All fields are little-endian.
"""

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .kernels import Config, all_finite, physical_memory_bytes, weight_memory
from .packing import Int8Matrix, Tensors, weight_bytes

MAGIC = 0x616B3432  # "ak42"
V0_HEADER_BYTES, V1_HEADER_BYTES = 28, 256
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
ROPE = "rope"  # the tables of version 0, which are skipped
V0_ORDER = ("tok_emb", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", ROPE, "wcls")
V1_ORDER = ("rms_att", "rms_ffn", "rms_final", "tok_emb", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls")
NORMS = ("rms_att", "rms_ffn", "rms_final")  # fp32 in every version
Bytes = npt.NDArray[np.uint8]


class CheckpointError(ValueError):
    """A file that cannot be used as a model: one line with the file, what is wrong and what would be right."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies in its file.

    config: the header's numbers; tensors: by llama2.c's names, in the shapes of `Config.shapes`, float32; in version 2 the
    matrices are `Int8Matrix`, with a list of them for those that each layer has. What is asked of a tensor is read then.
    """

    path: Path
    config: Config
    tensors: Tensors


class ModelFile:
    """A file of which parts are read. Not mapped: whoever truncates a mapped file kills those who look at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with telling_os_errors(path):
            if path.is_dir():
                raise CheckpointError(f"{path} is a directory; expected a llama2.c checkpoint file")
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is no regular file; expected a llama2.c checkpoint file")
            self._identity = _identity(path.stat())
            self.size = path.stat().st_size

    def read(self, start: int, n_bytes: int) -> Bytes:
        """That part of the file. Raises CheckpointError where it is not the file any more that it was."""
        data = np.empty(n_bytes, np.uint8)
        done = 0
        with telling_os_errors(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < n_bytes and (n := file.readinto(data.data[done:])):
                done += n
            identity = _identity(os.fstat(file.fileno()))
        if done < n_bytes or identity != self._identity:
            raise CheckpointError(f"{self.path} has changed while it was read; try again when it is whole")
        return data


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """A tensor that lies in a file. [layer] is the part of a layer; [first:last], of rows or numbers, is read, an array.

    what: its numbers are, "weights" or "scales". Raises CheckpointError for such as are not finite, and for negative scales.
    """

    file: ModelFile
    name: str
    dtype: npt.DTypeLike
    shape: tuple[int, ...]
    start: int
    what: str = "weights"

    def __getitem__(self, index: int | slice) -> Any:
        inner = self.shape[1:]
        stride = math.prod(inner) * np.dtype(self.dtype).itemsize
        if isinstance(index, int):
            return replace(self, shape=inner, start=self.start + index * stride)
        first, last, _ = index.indices(self.shape[0])
        data = self.file.read(self.start + first * stride, (last - first) * stride).view(self.dtype).reshape(last - first, *inner)
        if data.dtype == np.float32 and not all_finite(data):
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds NaN or infinite {self.what}")
        if self.what == "scales" and (data < 0).any():
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds negative scales")
        return data


class Header(NamedTuple):
    """The config, the order of the tensors, where the first one begins, and how many weights share a scale (0: fp32)."""

    config: Config
    order: tuple[str, ...]
    start: int
    group: int = 0


def load_checkpoint(path: str | os.PathLike[str], int8: bool = False) -> Checkpoint:
    """Open a checkpoint of version 0, 1 or 2, after checking all that its header can tell.

    int8: whether fp32 weights are to be quantized, on which depends whether the machine can hold them.
    Raises CheckpointError for anything but a complete and consistent model; numbers are checked when they are read.
    """
    file = ModelFile(Path(path))
    config, order, at, file_group = _read_header(file)
    shapes = config.shapes()
    if ROPE in order:
        shapes[ROPE] = (config.seq_len, config.head_dim)
    groups = {name: 0 if name in NORMS else file_group for name in order if name in shapes}
    _check_groups(file.path, groups, shapes)
    _check_size(file, at + sum(_n_bytes(math.prod(shapes[name]), group) for name, group in groups.items()))
    _check_memory(file.path, config, weight_bytes(config, file_group, int8))

    def take(name: str, dtype: str, shape: tuple[int, ...], what: str = "weights") -> FileTensor:
        nonlocal at
        start, at = at, at + math.prod(shape) * np.dtype(dtype).itemsize
        return FileTensor(file, name, dtype, shape, start, what)

    def take_int8(name: str, shape: tuple[int, ...], group: int) -> Int8Matrix:
        values = take(name, "i1", shape)
        return Int8Matrix(values, take(name, "<f4", (math.prod(shape) // group,), "scales"))

    tensors: dict[str, Any] = {}
    for name, group in groups.items():
        shape = shapes[name]
        if not group:
            tensors[name] = take(name, "<f4", shape)
        elif len(shape) == 2:
            tensors[name] = take_int8(name, shape, group)
        else:
            tensors[name] = [take_int8(name, shape[1:], group) for _ in range(shape[0])]
    tensors.pop(ROPE, None)
    return Checkpoint(file.path, config, tensors)


def _n_bytes(n: int, group: int) -> int:
    """Bytes of a tensor of n weights in the file."""
    return n + 4 * n // group if group else 4 * n


@contextmanager
def telling_os_errors(path: Path) -> Iterator[None]:
    """What the system says of a file, as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read {path}: {reason}") from None


def _read_header(file: ModelFile) -> Header:
    path = file.path
    if file.size < V0_HEADER_BYTES:
        what = "is empty" if file.size == 0 else f"is truncated: {file.size} bytes cannot hold a header"
        raise CheckpointError(f"{path} {what}; expected a llama2.c checkpoint")
    head = file.read(0, min(file.size, V1_HEADER_BYTES)).tobytes()
    magic, version = struct.unpack_from("<Ii", head)
    if magic != MAGIC:
        numbers = dict(zip(FIELDS, struct.unpack_from("<7i", head), strict=True))
        shared = numbers["vocab_size"] > 0
        numbers["vocab_size"] = abs(numbers["vocab_size"])
        return Header(_check_config(path, numbers, shared), V0_ORDER, V0_HEADER_BYTES)
    if version not in (1, 2):
        raise CheckpointError(f"{path} is a checkpoint of unknown version {version}; expected 1 or 2 (0 has no magic number)")
    if len(head) < V1_HEADER_BYTES:
        raise CheckpointError(f"{path} is truncated: {len(head)} bytes, a version {version} header alone has {V1_HEADER_BYTES}")
    *numbers_v1, shared_flag, group = struct.unpack_from("<7iBi", head, 8)
    if shared_flag > 1:
        raise CheckpointError(f"{path} has a shared-classifier flag of {shared_flag}; expected 0 or 1")
    config = _check_config(path, dict(zip(FIELDS, numbers_v1, strict=True)), bool(shared_flag))
    if version == 2 and group <= 0:
        raise CheckpointError(f"{path} has a group size of {group}; expected a positive number of weights that share a scale")
    return Header(config, V1_ORDER, V1_HEADER_BYTES, group if version == 2 else 0)


def _check_groups(path: Path, groups: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, group in groups.items():
        n = math.prod(shapes[name][-2:])
        if group and n % group:
            raise CheckpointError(f"{path} has a group size of {group}, which does not divide the {n} weights of {name}")


def _check_config(path: Path, numbers: dict[str, int], shared: bool) -> Config:
    config = Config(**numbers, shared_classifier=shared)
    if flaw := config.flaw():
        raise CheckpointError(f"{path} is not a llama2.c checkpoint, or a damaged one: {flaw}")
    return config


def _check_size(file: ModelFile, expected: int) -> None:
    if file.size != expected:
        what = "truncated" if file.size < expected else "too long"
        raise CheckpointError(f"{file.path} is {what}: {file.size} bytes, its header describes {expected}")


def _check_memory(path: Path, config: Config, bytes_each: float) -> None:
    """Refuse weights that the machine cannot hold."""
    needed, memory = weight_memory(config, bytes_each), physical_memory_bytes()
    if needed > memory:
        raise CheckpointError(f"{path} needs {needed / 2**30:.2f} GiB; this machine has {memory / 2**30:.2f} GiB of memory")
