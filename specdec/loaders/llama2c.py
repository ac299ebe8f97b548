"""A llama2.c checkpoint to a `Config` and tensors, and every check of it. Knows nothing of arithmetic.

Layouts as in karpathy/llama2.c: run.c reads version 0, export.py writes versions 0 to 2. All fields are little-endian.
"""

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.config import Config
from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import Checkpoint, FileTensor, ModelFile
from specdec.loaders.format_sniffing import DOWNLOAD_AGAIN, MODEL
from specdec.model.llama import LLAMA
from specdec.quant.matrix import Grouped

MAGIC = 0x616B3432  # "ak42"
V0_HEADER_BYTES, V1_HEADER_BYTES = 28, 256
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
ROPE = "rope"  # the tables of version 0, which are skipped
V0_ORDER = ("tok_emb", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", ROPE, "wcls")
V1_ORDER = ("rms_att", "rms_ffn", "rms_final", "tok_emb", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls")
TOKENIZER = re.compile(rb".{8}\x05\0\0\0<unk>", re.DOTALL)  # the first bytes of a tokenizer.bin: longest, score, length, piece
NORMS = ("rms_att", "rms_ffn", "rms_final")  # fp32 in every version


class Header(NamedTuple):
    """The config, the order of the tensors, where the first one begins, and how many weights share a scale (0: fp32)."""

    config: Config
    order: tuple[str, ...]
    start: int
    group: int = 0


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of version 0, 1 or 2, after checking all that its header can tell.

    Raises CheckpointError for anything but a complete and consistent model; numbers are checked when they are read.
    """
    file = ModelFile(Path(path))
    config, order, at, file_group = _read_header(file)
    shapes: dict[str, tuple[int, ...]] = {**LLAMA.shapes(config), ROPE: (config.seq_len, config.head_dim)}
    groups = {name: 0 if name in NORMS else file_group for name in order if name in shapes}
    for name, group in groups.items():
        n = math.prod(shapes[name][-2:])
        if group and n % group:
            raise CheckpointError(f"{file.path} has a group size of {group}, which does not divide the {n} weights of {name}")
    sizes = {name: _n_bytes(math.prod(shapes[name]), group) for name, group in groups.items()}
    if file.size != (expected := at + sum(sizes.values())):
        what = "truncated" if file.size < expected else "too long"
        told = f"{file.path} is {what}: {file.size} bytes, its header describes {expected}; {DOWNLOAD_AGAIN}"
        raise CheckpointError(told)
    tensors: dict[str, Any] = {}
    for name, group in groups.items():
        shape, n_matrices = shapes[name], math.prod(shapes[name][:-2])
        if not group:
            tensors[name] = FileTensor(file, name, shape, at)
        else:
            n_bytes = sizes[name] // n_matrices
            own = [Int8Tensor(file, name, (shape[-2], shape[-1]), at + i * n_bytes, group) for i in range(n_matrices)]
            tensors[name] = own if len(shape) > 2 else own[0]
        at += sizes[name]
    tensors.pop(ROPE, None)
    return Checkpoint(file.path, config, tensors)


@dataclass(frozen=True)
class Int8Tensor:
    """A matrix of version 2: int8 values, a scale for each run of `file_group` of them, which may cross rows.

    [first:last] of rows is `Grouped`, in the largest groups that cross none. Raises CheckpointError for scales that are none.
    """

    file: ModelFile
    name: str
    shape: tuple[int, int]
    start: int
    file_group: int

    @property
    def scales(self) -> FileTensor:
        n = math.prod(self.shape)
        return FileTensor(self.file, self.name, (n // self.file_group,), self.start + n, "scales")

    @property
    def group(self) -> int:
        """How many consecutive weights of a row share a scale, wherever the row begins."""
        return math.gcd(self.file_group, self.shape[1])

    def __getitem__(self, index: slice) -> Grouped:
        first, last, _ = index.indices(self.shape[0])
        n = self.shape[1]
        values = self.file.read(self.start + first * n, (last - first) * n).view(np.int8)
        runs = np.arange(first * n, last * n, self.group) // self.file_group
        scales = self.scales[runs[0] : runs[-1] + 1] if last > first else self.scales[:0]
        if (scales < 0).any():
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds negative scales")
        rows = last - first
        return Grouped(values.reshape(rows, -1, self.group), scales[runs - runs[0] if rows else runs].reshape(rows, -1))


def _n_bytes(n: int, group: int) -> int:
    """Bytes of a tensor of n weights in the file."""
    return n + 4 * n // group if group else 4 * n


def _read_header(file: ModelFile) -> Header:
    path = file.path
    if file.size < V0_HEADER_BYTES:
        what = "is empty" if file.size == 0 else f"is truncated: {file.size} bytes cannot hold a header"
        raise CheckpointError(f"{path} {what}; {MODEL}")
    head = file.read(0, min(file.size, V1_HEADER_BYTES)).tobytes()
    if TOKENIZER.match(head):
        raise CheckpointError(f"{path} is a llama2.c tokenizer, not a model; name it with tokenizer=...")
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


def _check_config(path: Path, numbers: dict[str, Any], shared: bool) -> Config:
    config = Config(**numbers, shared_classifier=shared)
    if flaw := config.flaw():
        raise CheckpointError(f"{path} is not a model file, or is a damaged llama2.c checkpoint ({flaw}); {MODEL}")
    return config
