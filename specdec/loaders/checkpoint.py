"""Checkpoints, and the files and tensors that they are read from on demand, whatever the format."""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.argument_checks import wrap_read_errors
from specdec.families.config_values import CheckpointError
from specdec.families.tensor_specs import TensorSpec
from specdec.model_config import ModelConfig
from specdec.runtime.memory import all_finite
from specdec.runtime.simd import Int64

FP32, FP16, BF16 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2")  # bf16 as bits: numpy has no such type
FLOATS: dict[str, np.dtype[Any]] = {"F32": FP32, "F16": FP16, "BF16": BF16}  # by their names in files
BYTE = np.dtype("u1")  # raw bytes of quantized blocks
READ_CHUNK_BYTES = 1 << 26  # Ctrl-C works between two reads
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Checkpoint:
    """An opened model or draft head: config, tokenizer data, and tensors that are read from the files when they are indexed.

    Attributes:
        path: The file or folder.
        config: The model's config.
        tensors: Tensors by the names and in the shapes of the config's architecture.
        eos_tokens: Names by id of the tokens that end a sequence, where the files give the ids.
        bos_token_id: Id of the BOS token, where the files give it.
        vocabulary: Keys of the tokenizer that lies in the same file; empty if none does.
        chat_template: Chat template of the same file, if it has one.
        target_ids: Target token id of each row of a draft head's vocabulary, (V,), each id once; None: row i is id i.
            A head has no tokenizer of its own.
        family: Name of the model's family in the file, where it gives one.
        default_sampling: Sampling parameters that the model's authors recommend, by the names of `sampling.Sampling`.
        mtp_specs: Tensor specs of the MTP head that the files may contain.
        pooling: Which hidden states make an embedding: "mean", "last", "cls" (the first), or "" if the files do not say.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Any]
    eos_tokens: dict[int, str] = field(default_factory=dict)
    bos_token_id: int | None = None
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    target_ids: Int64 | None = None
    family: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    mtp_specs: Sequence[Mapping[str, TensorSpec]] = ()
    pooling: str = ""


SAMPLING_RANGES = {  # lowest and highest accepted value
    "temperature": (0, 100.0), "top_p": (0, 1.0), "top_k": (0, 1e9), "min_p": (0, 1.0), "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (0, 100.0), "frequency_penalty": (0, 100.0),
}  # fmt: skip


def parse_default_sampling(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Return the sampling parameters that a model's file recommends, as a dict from parameter name to number.

    Values that are not numbers or out of range are left out without an error, because the parameters are hints only.

    Args:
        values: Values of the file by key.
        names: For each parameter of `sampling.Sampling`, its key in the file.
    """
    found = ((name, values.get(key)) for name, key in names.items())
    return {
        name: value
        for name, value in found
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and SAMPLING_RANGES[name][0] <= value <= SAMPLING_RANGES[name][1]
    }


class ModelFile:
    """A file of a model, to read ranges of bytes from, with a check that it stays the same file while it is in use.

    Raises CheckpointError if it cannot be read. It is not memory-mapped: truncating a mapped file kills every process that reads
    the mapping.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with wrap_read_errors(path, CheckpointError, "a model file"):
            self._identity = _get_identity(path.stat())
            self.size = path.stat().st_size

    def read(self, start: int, n_bytes: int) -> Bytes:
        """Read n_bytes of the file from byte `start` on, and return them as a vector.

        Raises:
            CheckpointError: The file cannot be read, or has changed since this object was created.
        """
        return self.read_strided(start, 1, n_bytes, n_bytes).reshape(-1)

    def read_strided(self, start: int, n: int, n_bytes: int, stride: int) -> Bytes:
        """Read n runs of n_bytes of the file, and return them as (n, n_bytes).

        Args:
            start: Byte at which the first run begins.
            n: Number of runs.
            n_bytes: Bytes of a run.
            stride: Bytes from the start of a run to the start of the next.

        Raises:
            CheckpointError: As in `read`.
        """
        runs = np.empty((n, n_bytes), np.uint8)
        with wrap_read_errors(self.path, CheckpointError), self.path.open("rb", buffering=0) as file:
            chunks = runs.reshape(1, -1) if n_bytes == stride else runs
            is_complete = all(_fill_buffer(file, start + i * stride, chunk) for i, chunk in enumerate(chunks))
            identity = _get_identity(os.fstat(file.fileno()))
        if not is_complete or identity != self._identity:
            raise CheckpointError(f"{self.path} changed while it was being read; try again when it is complete")
        return runs


def _fill_buffer(file: FileIO, start: int, data: Bytes) -> bool:
    """Fill a buffer with the bytes of a file from byte `start` on; return False if the file ends before the buffer is full."""
    file.seek(start)
    done = 0
    while done < data.size and (n := file.readinto(data.data[done : done + READ_CHUNK_BYTES])):
        done += n
    return done == data.size


def _get_identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """A tensor of floats or raw bytes in a file, read on demand: [first:last] reads rows, or numbers of a vector, as an array.

    [i] is a view of one layer and reads nothing. Reading raises CheckpointError for numbers that are not finite.

    Attributes:
        file: The file.
        name: Name of the tensor for error messages.
        shape: Its shape.
        start: Its first byte in the file.
        value_name: What its numbers are, for error messages.
        dtype: FP32, FP16, BF16 or BYTE.
    """

    file: ModelFile
    name: str
    shape: tuple[int, ...]
    start: int
    value_name: str = "weights"
    dtype: np.dtype[Any] = FP32

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row of the tensor in the file."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __getitem__(self, index: int | slice) -> Any:
        inner = self.shape[1:]
        if isinstance(index, int):
            return replace(self, shape=inner, start=self.start + index * self.row_bytes)
        first, last, _ = index.indices(self.shape[0])
        data = self.file.read(self.start + first * self.row_bytes, max(last - first, 0) * self.row_bytes)
        return self.check_finite(data.view(self.dtype).reshape(-1, *inner))

    def slice_rows(self, first: int, last: int) -> "FileTensor":
        """Return a view of rows first to last - 1, without reading them."""
        return replace(self, shape=(last - first, *self.shape[1:]), start=self.start + first * self.row_bytes)

    def flatten_matrices(self) -> "FileTensor":
        """Return a view of the tensor as one matrix, with its matrices stacked along the rows, without reading anything."""
        return replace(self, shape=(math.prod(self.shape[:-1]), self.shape[-1]))

    def reorder_heads(self, head_dim: int, rotary_dim: int, head_interleave: tuple[int, int] = (0, 1)) -> "DerivedTensor":
        """Return a tensor with the rows of each attention head in the order of our RoPE, which rotates pairs of adjacent rows.

        Of the first rotary_dim rows of a head, i and i + rotary_dim / 2 become 2i and 2i + 1. Nothing is read yet.

        Args:
            head_dim: Rows of a head.
            rotary_dim: Rows of a head that RoPE rotates; 0 keeps the order.
            head_interleave: (index, count): this tensor's heads are each count-th one from `index` on, interleaved with others.
        """
        (index, n_interleaved), inner = head_interleave, self.shape[1:]
        order = np.arange(head_dim)
        order[:rotary_dim] = order[:rotary_dim].reshape(2, -1).T.reshape(-1)

        def read_rows(first: int, last: int) -> npt.NDArray[Any]:
            begin, end = first // head_dim * head_dim, -(-last // head_dim) * head_dim
            heads = self[begin * n_interleaved : end * n_interleaved].reshape(-1, n_interleaved, head_dim, *inner)[:, index]
            return np.ascontiguousarray(heads[:, order]).reshape(-1, *inner)[first - begin : last - begin]

        return DerivedTensor(self, (self.shape[0] // n_interleaved, *inner), self.dtype, read_rows)

    def select_rows(self, indices: Int64) -> "DerivedTensor":
        """Return a tensor of the rows with the given indices, in the order of the indices, without reading them.

        Runs of adjacent rows are read at once later.
        """

        def read_rows(first: int, last: int) -> npt.NDArray[Any]:
            selected = indices[first:last]
            ends = [0, *(np.flatnonzero(selected[1:] != selected[:-1] + 1) + 1).tolist(), len(selected)]
            runs = (self[int(selected[i]) : int(selected[j - 1]) + 1] for i, j in itertools.pairwise(ends) if i < j)
            return np.concatenate([self[:0], *runs])

        return DerivedTensor(self, (len(indices), *self.shape[1:]), self.dtype, read_rows)

    def read_columns(self, first: int, last: int) -> npt.NDArray[Any]:
        """Read columns first to last - 1 of this matrix (n, columns) as an array (n, last - first).

        Raises:
            CheckpointError: The file has changed, or a number is NaN or infinite.
        """
        size = self.dtype.itemsize
        data = self.file.read_strided(self.start + first * size, self.shape[0], (last - first) * size, self.row_bytes)
        return self.check_finite(data.view(self.dtype))

    def check_finite(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Check that numbers read from this tensor are finite, and return them unchanged; raw bytes are not checked.

        Raises:
            CheckpointError: A number is NaN or infinite.
        """
        if self.dtype != BYTE and not all_finite(numbers):
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds NaN or infinite {self.value_name}")
        return numbers


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor with rows that are computed from another tensor when they are read.

    Attributes:
        source: The stored tensor.
        shape: Shape of the result.
        dtype: Dtype of the result.
        read_rows: Function of first and last that computes rows first to last - 1.
    """

    source: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read_rows: Callable[[int, int], npt.NDArray[Any]]

    def __getitem__(self, index: slice) -> npt.NDArray[Any]:
        first, last, _ = index.indices(self.shape[0])
        return self.read_rows(first, last)
