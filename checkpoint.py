"""Bytes of a llama2.c checkpoint file to a `Config` and tensors. Every check of a file is here; knows nothing of arithmetic.

Layouts as in karpathy/llama2.c: run.c reads version 0, export.py writes versions 0 to 2. All fields are little-endian.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdec.kernels import Config, Float32, all_finite, memory_bytes, physical_memory_bytes

MAGIC = 0x616B3432  # "ak42"
V0_HEADER_BYTES, V1_HEADER_BYTES = 28, 256
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
ROPE = "rope"  # the tables of version 0, which are skipped
V0_ORDER = ("tok_emb", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", ROPE, "wcls")
V1_ORDER = ("rms_att", "rms_ffn", "rms_final", "tok_emb", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls")
Bytes = npt.NDArray[np.uint8]


class CheckpointError(ValueError):
    """A file that cannot be used as a model: one line with the file, what is wrong and what would be right."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies in its file.

    config: the header's numbers; tensors: by llama2.c's names, in the shapes of `Config.shapes`, float32 views of the file.
    """

    path: Path
    config: Config
    tensors: dict[str, Float32]


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Map a checkpoint of version 0 or 1 into memory, after checking all that its bytes can tell.

    Raises CheckpointError for anything but a complete, consistent and finite model.
    """
    path = Path(path)
    data = _map(path)
    config, order, start = _read_header(path, data)
    shapes = config.shapes()
    if ROPE in order:
        shapes[ROPE] = (config.seq_len, config.head_dim)
    names = [name for name in order if name in shapes]
    _check_size(path, data.size, start + 4 * sum(math.prod(shapes[name]) for name in names))
    _check_memory(path, config)
    tensors = {}
    for name in names:
        end = start + 4 * math.prod(shapes[name])
        tensors[name] = data[start:end].view("<f4").reshape(shapes[name])
        start = end
    tensors.pop(ROPE, None)
    _check_finite(path, tensors)
    return Checkpoint(path, config, tensors)


def _map(path: Path) -> Bytes:
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a directory; expected a llama2.c checkpoint file")
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file; expected a llama2.c checkpoint file")
        size = path.stat().st_size
        if size < V0_HEADER_BYTES:
            what = "is empty" if size == 0 else f"is truncated: {size} bytes cannot hold a header"
            raise CheckpointError(f"{path} {what}; expected a llama2.c checkpoint")
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read {path}: {reason}") from None


def _read_header(path: Path, data: Bytes) -> tuple[Config, tuple[str, ...], int]:
    """The config, the order of the tensors, and where the first one begins."""
    head = data[:V1_HEADER_BYTES].tobytes()
    magic, version = struct.unpack_from("<Ii", head)
    if magic != MAGIC:
        numbers = dict(zip(FIELDS, struct.unpack_from("<7i", head), strict=True))
        shared = numbers["vocab_size"] > 0
        numbers["vocab_size"] = abs(numbers["vocab_size"])
        return _check_config(path, numbers, shared), V0_ORDER, V0_HEADER_BYTES
    if version == 2:
        raise CheckpointError(f"{path} is a version 2 (int8) checkpoint; only the fp32 versions 0 and 1 can be read")
    if version != 1:
        raise CheckpointError(f"{path} is a checkpoint of unknown version {version}; only 0 and 1 can be read")
    if len(head) < V1_HEADER_BYTES:
        raise CheckpointError(f"{path} is truncated: {len(head)} bytes, a version 1 header alone has {V1_HEADER_BYTES}")
    *numbers_v1, shared_flag = struct.unpack_from("<7iB", head, 8)
    if shared_flag > 1:
        raise CheckpointError(f"{path} has a shared-classifier flag of {shared_flag}; expected 0 or 1")
    numbers = dict(zip(FIELDS, numbers_v1, strict=True))
    return _check_config(path, numbers, bool(shared_flag)), V1_ORDER, V1_HEADER_BYTES


def _check_config(path: Path, numbers: dict[str, int], shared: bool) -> Config:
    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is not a llama2.c checkpoint, or a damaged one: {what}")

    for name, value in numbers.items():
        if value <= 0:
            raise refuse(f"{name} is {value}; expected a positive number")
    dim, n_heads, n_kv_heads = numbers["dim"], numbers["n_heads"], numbers["n_kv_heads"]
    if dim % n_heads:
        raise refuse(f"dim {dim} is not divisible by n_heads {n_heads}")
    if n_heads % n_kv_heads:
        raise refuse(f"n_heads {n_heads} is not divisible by n_kv_heads {n_kv_heads}")
    if dim // n_heads % 2:
        raise refuse(f"head_dim {dim // n_heads} (dim / n_heads) is odd; RoPE turns pairs")
    if numbers["vocab_size"] < 3:
        raise refuse(f"vocab_size is {numbers['vocab_size']}; BOS and EOS are the ids 1 and 2")
    return Config(**numbers, shared_classifier=shared)


def _check_size(path: Path, size: int, expected: int) -> None:
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise CheckpointError(f"{path} is {what}: {size} bytes, its header describes {expected}")


def _check_memory(path: Path, config: Config) -> None:
    """Refuse what the machine cannot hold; a version 1 header may declare any seq_len without a byte to show for it."""
    needed, memory = memory_bytes(config), physical_memory_bytes()
    if needed > memory:
        raise CheckpointError(
            f"{path} needs {needed / 2**30:.2f} GiB with its seq_len of {config.seq_len}; "
            f"this machine has {memory / 2**30:.2f} GiB of memory"
        )


def _check_finite(path: Path, tensors: dict[str, Float32]) -> None:
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CheckpointError(f"{path} is damaged: {name} holds NaN or infinite weights")
