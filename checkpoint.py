"""Bytes of a llama2.c checkpoint file to a `Config` and tensors. Every check of a file is here; knows nothing of arithmetic.

Layouts as in karpathy/llama2.c: run.c reads version 0, export.py writes versions 0 to 2. All fields are little-endian.
"""

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .kernels import Config, Float32, all_finite, memory_bytes, physical_memory_bytes
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

    config: the header's numbers; tensors: by llama2.c's names, in the shapes of `Config.shapes`, float32 views of the file; in
    version 2 the matrices are `Int8Matrix`, with a list of them for those that each layer has. release lets the part of the file
    that has been read leave the memory until it is read again.
    """

    path: Path
    config: Config
    tensors: Tensors
    release: Callable[[], None]


class Header(NamedTuple):
    """The config, the order of the tensors, where the first one begins, and how many weights share a scale (0: fp32)."""

    config: Config
    order: tuple[str, ...]
    start: int
    group: int = 0


def load_checkpoint(path: str | os.PathLike[str], int8: bool = False) -> Checkpoint:
    """Map a checkpoint of version 0, 1 or 2 into memory, after checking all that its bytes can tell.

    int8: whether fp32 weights are to be quantized, on which depends whether the machine can hold them.
    Raises CheckpointError for anything but a complete, consistent and finite model.
    """
    path = Path(path)
    mapped = _map(path)
    data: Bytes = np.frombuffer(mapped, np.uint8)
    config, order, at, file_group = _read_header(path, data)
    shapes = config.shapes()
    if ROPE in order:
        shapes[ROPE] = (config.seq_len, config.head_dim)
    groups = {name: 0 if name in NORMS else file_group for name in order if name in shapes}
    _check_groups(path, groups, shapes)
    _check_size(path, data.size, at + sum(_n_bytes(math.prod(shapes[name]), group) for name, group in groups.items()))
    _check_memory(path, config, weight_bytes(config, file_group, int8))

    def release() -> None:
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def take(dtype: str, shape: tuple[int, ...]) -> Any:
        nonlocal at
        start, at = at, at + math.prod(shape) * np.dtype(dtype).itemsize
        return data[start:at].view(dtype).reshape(shape)

    def take_int8(shape: tuple[int, ...], group: int) -> Int8Matrix:
        return Int8Matrix(take("i1", shape), take("<f4", (math.prod(shape) // group,)).copy())  # aligned

    tensors: dict[str, Any] = {}
    for name, group in groups.items():
        shape = shapes[name]
        if not group:
            tensors[name] = take("<f4", shape)
        elif len(shape) == 2:
            tensors[name] = take_int8(shape, group)
        else:
            tensors[name] = [take_int8(shape[1:], group) for _ in range(shape[0])]
    tensors.pop(ROPE, None)
    _check_finite(path, tensors, release)
    return Checkpoint(path, config, tensors, release)


def _n_bytes(n: int, group: int) -> int:
    """Bytes of a tensor of n weights in the file."""
    return n + 4 * n // group if group else 4 * n


def _map(path: Path) -> mmap.mmap:
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a directory; expected a llama2.c checkpoint file")
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file; expected a llama2.c checkpoint file")
        size = path.stat().st_size
        if size < V0_HEADER_BYTES:
            what = "is empty" if size == 0 else f"is truncated: {size} bytes cannot hold a header"
            raise CheckpointError(f"{path} {what}; expected a llama2.c checkpoint")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read {path}: {reason}") from None


def _read_header(path: Path, data: Bytes) -> Header:
    head = data[:V1_HEADER_BYTES].tobytes()
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


def _check_size(path: Path, size: int, expected: int) -> None:
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise CheckpointError(f"{path} is {what}: {size} bytes, its header describes {expected}")


def _check_memory(path: Path, config: Config, bytes_each: float) -> None:
    """Refuse what the machine cannot hold; a version 1 header may declare any seq_len without a byte to show for it."""
    needed, memory = memory_bytes(config, bytes_each), physical_memory_bytes()
    if needed > memory:
        raise CheckpointError(
            f"{path} needs {needed / 2**30:.2f} GiB with its seq_len of {config.seq_len}; "
            f"this machine has {memory / 2**30:.2f} GiB of memory"
        )


def _check_finite(path: Path, tensors: Tensors, done: Callable[[], None]) -> None:
    for name, tensor in tensors.items():
        parts = tensor if isinstance(tensor, list) else [tensor]
        numbers: list[Float32] = [part.scales if isinstance(part, Int8Matrix) else part for part in parts]
        is_int8 = isinstance(parts[0], Int8Matrix)
        if not all(map(all_finite, numbers)):
            raise CheckpointError(f"{path} is damaged: {name} holds NaN or infinite {'scales' if is_int8 else 'weights'}")
        if is_int8 and any((scales < 0).any() for scales in numbers):
            raise CheckpointError(f"{path} is damaged: {name} holds negative scales")
        done()
