"""Checkpoints, and their tensors, which are read from files on demand, whatever the format."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specdec.argument_checks import CheckpointError, JSONObject, format_json_value
from specdec.head_config import HeadConfig
from specdec.loaders.model_file import ModelFile
from specdec.model_config import ModelConfig
from specdec.runtime.memory import all_finite
from specdec.runtime.simd import Array, Float64, Int64

if TYPE_CHECKING:
    from specdec.families.tensor_specs import TensorSpec
    from specdec.layers.weights import Tensors

FP32, FP16, BF16 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2")  # bf16 as bits: numpy has no such type
Dtype = np.dtype[Any]
BYTE = np.dtype("u1")  # raw bytes of quantized blocks
FLOATS: dict[str, Dtype] = {"F32": FP32, "F16": FP16, "BF16": BF16}  # by their names in files
INTEGERS: dict[str, Dtype] = {"I64": np.dtype("<i8")}
MAX_SPREAD = 2  # rows that are read at once for each of some selected rows


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
        tool_template: Chat template for conversations with tools of the same file, if it has one.
        target_ids: Target token id of each row of a draft head's vocabulary, (V,), each id once; None: row i is id i.
            A head has no tokenizer of its own.
        family: Name of the model's family in the file, where it gives one.
        default_sampling: Sampling parameters that the model's authors recommend, by the names of `sampling.Sampling`.
        mtp_specs: Tensor specs of the MTP head that the files may contain.
        pooling: Which hidden states make an embedding: "mean", "last", "cls" (the first), or "" if the files do not say.
        rerank_template: Prompt with {query} and {document}, and maybe {instruction}, if the model is a reranker.
        rerank_head: Weights (D,) whose product with the last hidden state is the logit of a reranker's score, in float64; None if
            the classifier gives it.
    """

    path: Path
    config: ModelConfig
    tensors: "Tensors"
    eos_tokens: dict[int, str] = field(default_factory=dict)
    bos_token_id: int | None = None
    vocabulary: JSONObject = field(default_factory=dict)
    chat_template: str | None = None
    tool_template: str | None = None
    target_ids: Int64 | None = None
    family: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    mtp_specs: "Sequence[Mapping[str, TensorSpec]]" = ()
    pooling: str = ""
    rerank_template: str = ""
    rerank_head: Float64 | None = None


SAMPLING_RANGES = {  # lowest and highest accepted value
    "temperature": (0, 100.0), "top_p": (0, 1.0), "top_k": (0, 1e9), "min_p": (0, 1.0), "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (0, 100.0), "frequency_penalty": (0, 100.0),
}  # fmt: skip


def parse_default_sampling(values: JSONObject, names: Mapping[str, str]) -> dict[str, float]:
    """Return the sampling parameters that a model's file recommends, as a dict from parameter name to number.

    Values that are not numbers or out of range are left out without an error, because the parameters are hints only.

    Args:
        values: Values of the file by key.
        names: For each parameter of `sampling.Sampling`, its key in the file.
    """
    found = ((name, values.get(key)) for name, key in names.items())
    return {
        name: int(value) if name == "top_k" else value
        for name, value in found
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and SAMPLING_RANGES[name][0] <= value <= SAMPLING_RANGES[name][1]
    }


def check_target_ids(ids: Int64, vocab_size: int, source: str) -> Int64:
    """Check that the token id map of a draft head holds valid ids of the target, each once, and return it unchanged.

    Args:
        ids: The target's token id for each row of the head's vocabulary, (n_rows,).
        vocab_size: The target's vocabulary size.
        source: Where the ids are stored, for errors.

    Raises:
        CheckpointError: An id is out of range or occurs twice.
    """
    if (wrong := np.flatnonzero((ids < 0) | (ids >= vocab_size))).size:
        row = wrong[0]
        raise CheckpointError(f"{source} maps row {row} to the id {ids[row]}; expected 0 to {vocab_size - 1}, the target's ids")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise CheckpointError(f"{source} maps {counts.max()} rows to the id {values[counts.argmax()]}; expected each id once")
    return ids


def check_id_map(head: HeadConfig, vocab_size: int, has_ids: bool, source: str) -> None:
    """Raise CheckpointError if a draft head has fewer token ids than its target and no map to the target's ids.

    Args:
        head: The head's config.
        vocab_size: The target's vocabulary size.
        has_ids: Whether the head's files hold an id map.
        source: The head's file, for errors.
    """
    if head.draft_vocab_size < vocab_size and not has_ids:
        raise CheckpointError(
            f"{source}: the head has {head.draft_vocab_size} of {vocab_size} ids, but no d2t tensor to map them to the target's"
        )


@dataclass(frozen=True)
class FileTensor:
    """A tensor of floats or raw bytes in a file, read on demand: [first:last] reads rows, or numbers of a vector, as an array.

    [i] is a view of one layer and reads nothing. Reading raises CheckpointError for numbers that are not finite.

    Attributes:
        file: The file.
        name: Name of the tensor for error messages.
        shape: Its shape.
        start: Its first byte in the file.
        dtype: FP32, FP16, BF16, BYTE, or one of INTEGERS.
    """

    file: ModelFile
    name: str
    shape: tuple[int, ...]
    start: int
    dtype: Dtype = FP32

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row of the tensor in the file."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __getitem__(self, index: int | slice) -> Any:
        """Read rows, or numbers of a vector, for a slice; return one inner tensor, unread, for an int."""
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

    def select_rows(self, indices: Int64) -> "DerivedTensor":
        """Return a tensor of the rows with the given indices, in the order of the indices, without reading them.

        Later, rows that lie close together are read at once, otherwise each run of adjacent rows.
        """

        def read_rows(first: int, last: int) -> Array:
            selected = indices[first:last]
            low, high = (int(selected.min()), int(selected.max())) if selected.size else (0, -1)
            if high - low < MAX_SPREAD * selected.size:
                return np.ascontiguousarray(self[low : high + 1][selected - low])
            ends = [0, *(np.flatnonzero(selected[1:] != selected[:-1] + 1) + 1).tolist(), len(selected)]
            runs = (self[int(selected[i]) : int(selected[j - 1]) + 1] for i, j in itertools.pairwise(ends) if i < j)
            return np.concatenate([*runs])

        return DerivedTensor(self, (len(indices), *self.shape[1:]), self.dtype, read_rows)

    def read_columns(self, first: int, last: int) -> Array:
        """Read columns first to last - 1 of this matrix (n, columns) as an array (n, last - first).

        Raises:
            CheckpointError: The file has changed, or a number is NaN or infinite.
        """
        size = self.dtype.itemsize
        data = self.file.read_strided(self.start + first * size, self.shape[0], (last - first) * size, self.row_bytes)
        return self.check_finite(data.view(self.dtype))

    def check_finite(self, numbers: Array) -> Array:
        """Check that floats read from this tensor are finite, and return them unchanged; bytes and integers are not checked.

        Raises:
            CheckpointError: A number is NaN or infinite.
        """
        if self.dtype in FLOATS.values() and not all_finite(numbers):
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds NaN or infinite weights")
        return numbers


class TensorEntry(NamedTuple):
    """An entry of a file's header for one tensor.

    Attributes:
        type: Name of the tensor's type in the file, such as "BF16".
        shape: Its shape in numbers, outermost dimension first.
        start: Its first byte in the file.
        n_bytes: Number of its bytes in the file.
    """

    type: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


class TensorFile:
    """A file with the parsed entries of its header; tensors are read when they are indexed. Base class of the formats.

    Attributes:
        path: The file.
        entries: The entries by tensor name.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; raise CheckpointError if it cannot be read."""
        self.path, self._file = path, ModelFile(path)
        self.entries: dict[str, TensorEntry] = {}

    def get_tensor(self, name: str, types: Mapping[str, Dtype] = FLOATS) -> Any:
        """Return the tensor with a name for reading later.

        Args:
            name: Name of the tensor in the file.
            types: Accepted types: numpy's by the name in the file.

        Raises:
            CheckpointError: The tensor has another type.
        """
        entry = self.entries[name]
        if entry.type not in types:
            raise self._file.make_error(name, f"is {format_json_value(entry.type)}; expected {', '.join(types)}")
        return FileTensor(self._file, name, entry.shape, entry.start, types[entry.type])


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
    dtype: Dtype
    read_rows: Callable[[int, int], Array]

    def __getitem__(self, index: slice) -> Array:
        """Compute and return the rows of a slice."""
        first, last, _ = index.indices(self.shape[0])
        return self.read_rows(first, last)

    def select_rows(self, indices: Int64) -> "DerivedTensor":
        """Return a tensor of the rows with the given indices; all rows between those of a slice are computed with it."""

        def read_rows(first: int, last: int) -> Array:
            selected = indices[first:last]
            if not selected.size:
                return self.read_rows(0, 0)
            low = int(selected.min())
            return np.ascontiguousarray(self.read_rows(low, int(selected.max()) + 1)[selected - low])

        return DerivedTensor(self.source, (len(indices), *self.shape[1:]), self.dtype, read_rows)
