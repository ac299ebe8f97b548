"""`Matrix`, packed weights as the kernels read them, and `WeightFormat`, the interface that each weight format implements.

Shapes: rows and n columns; P panels of R = PANEL_ROWS rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specdec.runtime.memory import align_to_cache_line, flatten, zeros
from specdec.runtime.op_program import Floats1, ForwardContext, Halves1, Kernel, Op, kernel, run_on_all_threads
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import LANES, PANEL_ROWS, Array, Float32, Int64, ceil_div, load, load_bf16, round_up, store
from specdec.runtime.work_stealing import get_chunk_range

Floats = Array  # see `Tensor`
MAX_BLOCK_PANELS = 64  # packed at a time: a 42M model loads in 0.13 s, with 16 panels in 0.17 s
MAX_BLOCK_WEIGHTS = 1 << 23  # limits the weights that are read but not yet packed, if there are many columns
HEAD_PANELS = 8  # blocks of a multiple of these end between heads of up to 256 rows, which some files store in another order


class Tensor(Protocol):
    """A matrix (rows, n) before it is packed: an array, or a view of a file. tensor[first:last] returns rows.

    A float tensor returns an array (rows, n) of its `dtype`: float32, float16, or uint16, which holds the bits of bf16. A tensor
    with weights that share scales has an attribute `group`, the group size, and returns `Int8Rows`. A tensor of a GGUF block type
    has the type's name in `type`, returns rows in float32, and has `read_blocks(first, last)`, which returns `GGUFBlockRows`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of rows and columns."""

    def __getitem__(self, rows: slice, /) -> Any:
        """Return the rows of a slice."""


@kernel
def widen(run: ForwardContext, thread: int, out: Floats1, bits: Halves1, are_fp16: int) -> None:
    """out[i] = bits[i] as float32; bits (n,) are fp16 (are_fp16: 1) or bf16 (0), and n is at least LANES.

    The last vector ends at the last element. A number takes 0.34 ns of CPU time; numpy takes 2.3 ns for fp16.
    """
    first, last = get_chunk_range(ceil_div(bits.size, LANES), run.chunk, run.n_chunks)
    for i in range(first, last):
        at = min(i * LANES, bits.size - LANES)
        store(out, at, load(bits, at) if are_fp16 else load_bf16(bits, at))


def to_float32(rows: "Floats | Int8Rows") -> Float32:
    """Return rows as float32 with exactly the same numbers; uint16 holds bf16 bits, and a float32 array is not copied."""
    if isinstance(rows, Int8Rows):
        return (rows.values * rows.scales[:, :, None]).reshape(len(rows.values), -1)
    if rows.dtype not in (np.float16, np.uint16):
        return rows.astype(np.float32, copy=False)
    bits = flatten(rows)
    out = np.empty(bits.size, np.float32)
    run_on_all_threads(widen(out, bits, rows.dtype == np.float16))
    return out[: rows.size].reshape(rows.shape)


@dataclass(frozen=True)
class Int8Rows:
    """Rows of int8 weights: values (rows, groups, group size), and float32 scales (rows, groups)."""

    values: npt.NDArray[np.int8]
    scales: Float32


@dataclass(frozen=True)
class GGUFBlockRows:
    """Rows of weights of a GGUF block type as the file's bytes.

    Attributes:
        type: Name of the block type.
        raw_bytes: The blocks, (rows, bytes).
        scales: Factor of each row, (rows,), or None; only for block types whose layout has row scales.
    """

    type: str
    raw_bytes: npt.NDArray[np.uint8]
    scales: Float32 | None = None


class PackingOverflowError(Exception):
    """Raised when rows do not fit the space that their weight format reserves for them."""


class ExpertRouting(NamedTuple):
    """The slots of a pass, pairs of a token and an expert, sorted by expert, one copy per thread: see `moe.route`."""

    tokens: Int64
    starts: Int64


@dataclass(frozen=True, kw_only=True)
class WeightFormat(ABC):
    """A weight format: how weights lie in panels, and the kernels that multiply them and look up embedding rows.

    Attributes:
        name: Name of the weights, for users.
        matmul: Kernel of `Matrix.matmul`, over `MatmulArgs`.
        embed: Kernel of `Matrix.embed`.
        expert_matmul: Kernel of `Matrix.expert_matmul`, over `ExpertMatmulArgs`.
        embedding_format: Format of the embedding and classifier, if another one.
        expert_format: Format of the expert matrices, if another one.
        fallback: Format of a matrix for which pack raises `PackingOverflowError`. Only matrices of that format are packed.
        column_multiple: The number of columns of a packed matrix is a multiple of this.
    """

    name: str
    matmul: Kernel
    embed: Kernel
    expert_matmul: Kernel
    embedding_format: ClassVar["WeightFormat | None"] = None
    expert_format: ClassVar["WeightFormat | None"] = None
    fallback: ClassVar["WeightFormat | None"] = None
    column_multiple: ClassVar[int] = 1

    def get_group_size(self, n: int, file_group: int) -> int:
        """Return how many weights share a scale in a matrix of n columns with this group size in the file; 0: none do."""
        return 0

    @abstractmethod
    def get_panel_shape(self, n: int, group_size: int) -> tuple[int, int]:
        """Return the shape of a panel of n columns, in words."""

    def get_scratch_words(self, n: int, group_size: int) -> int:
        """Return the words that a token's n activations take in the format's own form, at least 1: an array has one."""
        return 1

    def read_rows(self, tensor: Any, first: int, last: int) -> Any:
        """Return rows first to last (exclusive) of a `Tensor` in the form that `pack` takes."""
        return tensor[first:last]

    @abstractmethod
    def pack(self, panels: Float32, first: int, stride: int, rows: Any, group_size: int) -> None:
        """Pack rows into every stride-th of the panels from `first` on, whole panels except for the last ones of a tensor."""

    def get_panel_words(self, n: int) -> int:
        """Return the 4-byte words of a panel of n columns that is packed from floats or GGUF blocks."""
        return math.prod(self.get_panel_shape(n, self.get_group_size(n, 0)))


@dataclass(frozen=True)
class Matrix:
    """A matrix W (rows, n) of weights, packed in panels as the kernels read it; as a `Tensor` it returns rows in float32.

    Attributes:
        weight_format: The format of its panels.
        panels: (P, ...) as the format lays them out.
        n: Number of columns.
        group_size: Number of weights that share a scale, or 0.
        first_panel: Number of panels above it, for a shard of a matrix whose rows have several formats.
        n_total_panels: Number of panels of that whole matrix; 0: this is not a shard.
    """

    weight_format: WeightFormat
    panels: Float32
    n: int
    group_size: int
    first_panel: int = 0
    n_total_panels: int = 0

    @property
    def n_rows(self) -> int:
        """Number of rows, including the zero rows that fill up panels."""
        return len(self.panels) * PANEL_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows, including those that fill up panels, and columns."""
        return self.n_rows, self.n

    def __getitem__(self, rows: slice, /) -> Float32:
        """Return the rows of a slice as float32."""
        tokens = np.arange(*rows.indices(self.n_rows))
        out = np.empty((len(tokens), self.n), np.float32)
        run_on_all_threads(self.embed(out, tokens), n_tokens=len(tokens))
        return out

    @property
    def n_total_rows(self) -> int:
        """Number of rows of the whole matrix that this may be a shard of."""
        return self.n_total_panels * PANEL_ROWS or self.n_rows

    @property
    def scratch_words(self) -> int:
        """Words of scratch per token that `matmul` needs."""
        return self.weight_format.get_scratch_words(self.n, self.group_size)

    def matmul(
        self, out: Float32, x: Float32, scratch: Float32, *, accumulate: bool = False, unit: int = 1, logits_only: bool = False
    ) -> Op:
        """Return the op out[t] (+)= W x[t]; each thread computes its share of the panels, `unit` panels at a time.

        Args:
            out: (T, rows).
            x: (threads or 1, T, n or more): one copy per thread, or one for all threads.
            scratch: (threads, T, words).
            accumulate: Whether to add to out.
            unit: Number of panels that the same thread computes together.
            logits_only: Whether to use only the first n_logits tokens of out and x.
        """
        shard = self.first_panel, self.n_total_panels or len(self.panels)
        sizes = self.n, self.group_size
        op = self.weight_format.matmul(out, self.panels, x, scratch, *sizes, accumulate, unit, logits_only, *shard)
        return op._replace(bytes_per_token=self.panels.nbytes)

    def expert_matmul(
        self,
        out: Float32,
        x: Float32,
        scratch: Float32,
        gathered: Float32,
        routing: ExpertRouting,
        *,
        per_token: int = 0,
        unit: int = 1,
    ) -> Op:
        """Return the op out[slot] = W_e x[row of the slot], where e is the slot's expert; the experts' rows follow each other.

        Each thread computes its share of every expert's panels, and reads each expert that a token chose once.

        Args:
            out: (T k, rows of an expert).
            x: (threads or 1, T or T k, n or more).
            scratch: As in `matmul`.
            gathered: Scratch (threads, T, words or n) for the rows of one expert.
            routing: The slots of each expert.
            per_token: Rows of x per token, one for each of its slots, or 0: one row for all of its slots.
            unit: As in `matmul`.
        """
        sizes = self.n, self.group_size, per_token, unit
        op = self.weight_format.expert_matmul(out, self.panels, x, scratch, gathered, routing.tokens, routing.starts, *sizes)
        # Bytes of one expert, since every expert is split into chunks.
        return op._replace(bytes_per_token=self.panels.nbytes // (routing.starts.shape[1] - 1))

    def embed(self, out: Float32, tokens: Int64) -> Op:
        """Return the op out[t] = W[tokens[t]], which looks up embedding rows; zeros pad the rows of out."""
        return self.weight_format.embed(out, self.panels, tokens, self.n, self.group_size)

    def place(self, first_panel: int, n_total_panels: int) -> "Matrix":
        """Return the matrix as a shard that begins at a panel of a matrix of n_total_panels; unchanged if that is 0."""
        return replace(self, first_panel=first_panel, n_total_panels=n_total_panels) if n_total_panels else self

    def align_panels(self) -> "Matrix":
        """Return the same matrix with panels that start at a cache line, as tiles need; unpickled panels may not start at one."""
        return replace(self, panels=align_to_cache_line(self.panels))


@dataclass(frozen=True)
class LazyTable:
    """A tensor with a row for each token that stays in its file; only the rows of a pass's tokens are read."""

    tensor: Tensor

    def read_rows(self, tokens: Sequence[int]) -> Float32:
        """Read the rows of tokens from the file and return them as float32, (n, columns).

        Raises:
            CheckpointError: If the file has changed or is damaged.
        """
        rows = [_widen_rows(self.tensor[token : token + 1]) for token in tokens]
        return np.concatenate(rows) if rows else np.empty((0, self.tensor.shape[1]), np.float32)


def _widen_rows(rows: Floats) -> Float32:
    """Return rows (bf16 bits as uint16, or floats) as float32, on one thread: a row of 8,960 in 5 us, by `to_float32` in 80."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)


def count_panels(rows: int) -> int:
    """Return the number of panels that hold this many rows."""
    return int(ceil_div(rows, PANEL_ROWS))


def pack_matrix(
    tensors: Sequence[Tensor],
    weight_format: WeightFormat,
    n_interleaved: int = 1,
    allocate: Callable[..., Float32] = zeros,
    progress: Callable[[float], object] = lambda share: None,
) -> Matrix:
    """Return one matrix with the rows of several tensors packed below each other; each tensor starts at a new panel.

    Args:
        tensors: Tensors with the same number of columns.
        weight_format: Format of the matrix.
        n_interleaved: Number of consecutive tensors that take turns panel by panel; they must have as many rows.
        allocate: Function that returns zeros of a shape.
        progress: Callback that gets the fraction done.

    Raises:
        PackingOverflowError: The rows do not fit the space that the format reserves.
    """
    sizes = [count_panels(tensor.shape[0]) for tensor in tensors]
    n = tensors[0].shape[1]
    group_size = weight_format.get_group_size(n, getattr(tensors[0], "group", 0))
    panels = allocate(sum(sizes), *weight_format.get_panel_shape(n, group_size))
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        first = sum(sizes[: i - i % n_interleaved]) + i % n_interleaved
        for block in iter_panel_blocks(size, n):
            begin, end = block.start * PANEL_ROWS, min(block.stop * PANEL_ROWS, tensor.shape[0])
            rows = weight_format.read_rows(tensor, begin, end)
            weight_format.pack(panels, first + n_interleaved * block.start, n_interleaved, rows, group_size)
            progress((sum(sizes[:i]) + block.stop) / sum(sizes))
    return Matrix(weight_format, panels, n, group_size)


def convert(matrix: Matrix, weight_format: WeightFormat, allocate: Callable[..., Float32] = zeros) -> Matrix:
    """Return a new matrix with the weights of another one, converted to a weight format that packs floats.

    Args:
        matrix: The matrix to convert.
        weight_format: Format of the new matrix.
        allocate: Function that returns zeros of a shape.
    """
    return pack_matrix([matrix], weight_format, allocate=allocate).place(matrix.first_panel, matrix.n_total_panels)


def iter_panel_blocks(size: int, n: int) -> Iterable[slice]:
    """Iterate over slices that cover `size` panels of n columns, each with as many panels as are packed at a time."""
    max_panels = MAX_BLOCK_WEIGHTS // (PANEL_ROWS * n) // HEAD_PANELS * HEAD_PANELS
    step = min(MAX_BLOCK_PANELS, max(max_panels, round_up(get_available_threads(), HEAD_PANELS)))
    return (slice(first, min(first + step, size)) for first in range(0, size, step))
