"""A matrix as kernels read it, and what a kind of weights is. Knows no kind, no architecture and no file.

Shapes: rows and n columns; P strips of R = STRIP_ROWS rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specdec.runtime.memory import aligned, flat, zeros
from specdec.runtime.program import Floats1, Halves1, Operation, Pass, Row, on_all_threads, operation
from specdec.runtime.simd import LANES, Float32, Int64, ceil_div, load_bf16, load_fp16, round_up, store
from specdec.runtime.threads import available_threads
from specdec.runtime.tile import STRIP_ROWS
from specdec.runtime.work_stealing import share

Floats = npt.NDArray[Any]  # see `Tensor`
BLOCK_STRIPS = 64  # packed at a time: 42M loads in 0.13 s, with 16 in 0.17
BLOCK_WEIGHTS = 1 << 23  # or fewer strips, where columns are many: what is read and not yet packed stays small
ALL = slice(None)  # strips
HEAD_STRIPS = 8  # whose multiple ends between heads of up to 256 rows, which some files have in another order


class Tensor(Protocol):
    """A matrix (rows, n) before it is packed: an array, or one that a reader gives. [first:last] gives rows.

    Of floats they are an array (rows, n) of its `dtype`: float32, float16, or uint16, which stands for the bits of bf16. A tensor
    whose weights share scales says of how many `group` is, and gives `Grouped`. One of a GGUF block type says which: `type`, and
    `blocks(first, last)` gives the bytes (rows, bytes) of rows, uint8; its rows are float32.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, rows: slice, /) -> Any: ...


@operation
def widen(run: Pass, thread: int, out: Floats1, bits: Halves1, are_fp16: int) -> None:
    """out = the float32 of bits (n,) of fp16 or bf16, n at least LANES: the last vector ends where they end."""
    first, last = share(ceil_div(bits.size, LANES), run.part, run.n_parts)
    for place in range(first, last):
        at = min(place * LANES, bits.size - LANES)
        store(out, at, load_fp16(bits, at) if are_fp16 else load_bf16(bits, at))


def floats(rows: Floats) -> Float32:
    """The same numbers in float32, exactly; what is float32 stays where it is."""
    if rows.dtype not in (np.float16, np.uint16):
        return rows.astype(np.float32, copy=False)
    bits = flat(rows)
    out = np.empty(bits.size, np.float32)
    on_all_threads(widen(out, bits, rows.dtype == np.float16))
    return out[: rows.size].reshape(rows.shape)


@dataclass(frozen=True)
class Grouped:
    """Rows of int8: values (rows, groups, group), and scales (rows, groups), float32."""

    values: npt.NDArray[np.int8]
    scales: Float32


@dataclass(frozen=True)
class Blocks:
    """Rows of a GGUF block type, by its name, in the file's own bytes: octets (rows, bytes)."""

    type: str
    octets: npt.NDArray[np.uint8]


class NoRoom(Exception):
    """Rows do not fit the room that their kind of weights has for them."""


class Choice(NamedTuple):
    """Which expert each slot of a pass is for, every thread's own: see `experts.route`."""

    tokens: Int64
    starts: Int64


@dataclass(frozen=True)
class Kind:
    """A kind of weights, whole: how it lies in strips, what multiplies it, and how a row of an embedding comes out of it.

    name: of the weights, in words. product: the operation of `Matrix.product`, over a `Product`; embed: of `Matrix.embedding`;
    experts: of `Matrix.experts`, over a `Mixture`.
    group: of n columns and of a tensor's own group, how many weights share a scale; 0: none do.
    strip_shape: of n columns in groups. fill: every stride-th of the strips from `first` on, from rows.
    rows: the floats of strips, of all or of a slice. scratch_words: that a token's activations of n columns take, in a form of
    the kind's own. of_blocks: whether it is filled from `Blocks`. of_tables: what embedding and classifier become instead, if
    anything; of_experts: what the matrices of experts do; instead: what a matrix does whose fill raises `NoRoom`.
    """

    name: str
    product: Operation
    embed: Operation
    experts: Operation
    group: Callable[[int, int], int]
    strip_shape: Callable[[int, int], tuple[int, int]]
    fill: Callable[[Float32, int, int, Any, int], None]
    rows: Callable[..., Float32]
    scratch_words: Callable[[int, int], int]
    of_blocks: bool = False
    of_tables: "Kind | None" = None
    of_experts: "Kind | None" = None
    instead: "Kind | None" = None


@dataclass(frozen=True)
class Matrix:
    """W (rows, n), packed: strips (P, ...) as its kind lays them out; group: how many weights share a scale, or 0.

    first, total: of a piece of a matrix whose rows are of several kinds, how many strips lie above it, and how many there are in
    all; 0: it is whole.
    """

    kind: Kind
    strips: Float32
    n: int
    group: int
    first: int = 0
    total: int = 0

    @property
    def n_rows(self) -> int:
        """Rows, those that fill up strips among them."""
        return len(self.strips) * STRIP_ROWS

    @property
    def whole_rows(self) -> int:
        """The same of the whole that it is a piece of."""
        return self.total * STRIP_ROWS or self.n_rows

    @property
    def scratch_words(self) -> int:
        return self.kind.scratch_words(self.n, self.group)

    def product(
        self, out: Float32, x: Float32, scratch: Float32, *, adding: bool = False, unit: int = 1, of_logits: bool = False
    ) -> Row:
        """A row of a program: out[t] (+)= W x[t], each thread its share of the strips, `unit` of them at a time.

        out (T, rows); x (threads or 1, T, n or more): each thread's own or everybody's; scratch (threads, T, words);
        of_logits: of the first n_logits of out and x, instead of all tokens.
        """
        place = self.first, self.total or len(self.strips)
        row = self.kind.product(out, self.strips, x, scratch, self.n, self.group, adding, unit, of_logits, *place)
        return row._replace(work=self.strips.nbytes)

    def experts(
        self, out: Float32, x: Float32, scratch: Float32, gathered: Float32, choice: Choice, *, per_token: int = 0, unit: int = 1
    ) -> Row:
        """A row of a program: out[slot] = W_e x[row of the slot], e its expert, whose rows lie one expert's behind the other's.

        Each thread takes its share of every expert's strips, and each expert that a token chose is read once. out (T k, rows of
        an expert); x (threads or 1, T or T k, n or more): of per_token rows for a token, slot by slot, or of one for all of its
        slots (0); gathered (threads, T, words or n): room for the rows of one expert.
        """
        numbers = self.n, self.group, per_token, unit
        row = self.kind.experts(out, self.strips, x, scratch, gathered, choice.tokens, choice.starts, *numbers)
        return row._replace(work=self.strips.nbytes // (choice.starts.shape[1] - 1))  # of one expert: parts are of each

    def embedding(self, out: Float32, tokens: Int64) -> Row:
        """A row of a program: out[t] = W[tokens[t]], zeros behind it."""
        return self.kind.embed(out, self.strips, tokens, self.n, self.group)

    def aligned(self) -> "Matrix":
        """The same, whose strips begin at a cache line, as tiles need: those that were pickled may not."""
        return replace(self, strips=aligned(self.strips))


def n_strips(rows: int) -> int:
    """How many strips hold that many rows."""
    return int(ceil_div(rows, STRIP_ROWS))


def pack(tensors: Sequence[Tensor], kind: Kind, turns: int = 1, room: Callable[..., Float32] = zeros) -> Matrix:
    """Tensors, each from a strip of its own on, below each other, or so many at a time strip by strip in turns, as one matrix.

    Those that take turns have as many rows. room: gives zeros of a shape.
    """
    sizes = [n_strips(tensor.shape[0]) for tensor in tensors]
    n = tensors[0].shape[1]
    group = kind.group(n, getattr(tensors[0], "group", 0))
    strips = room(sum(sizes), *kind.strip_shape(n, group))
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        first = sum(sizes[: i - i % turns]) + i % turns
        for block in blocks(size, n):
            begin, end = block.start * STRIP_ROWS, min(block.stop * STRIP_ROWS, tensor.shape[0])
            kind.fill(strips, first + turns * block.start, turns, _rows(tensor, kind, begin, end), group)
    return Matrix(kind, strips, n, group)


def _rows(tensor: Any, kind: Kind, first: int, last: int) -> Any:
    """What that kind is filled from."""
    return Blocks(tensor.type, tensor.blocks(first, last)) if kind.of_blocks else tensor[first:last]


def converted(matrix: Matrix, kind: Kind, room: Callable[..., Float32] = zeros) -> Matrix:
    """A matrix in another kind of weights; room: gives zeros of a shape."""
    group = kind.group(matrix.n, 0)
    strips = room(len(matrix.strips), *kind.strip_shape(matrix.n, group))
    for block in blocks(len(strips), matrix.n):
        kind.fill(strips, block.start, 1, matrix.kind.rows(matrix.strips, matrix.n, matrix.group, block), group)
    return replace(matrix, kind=kind, strips=strips, group=group)


def blocks(size: int, n: int) -> Iterable[slice]:
    """Slices over so many strips of n columns, of as many as are packed at a time."""
    few = BLOCK_WEIGHTS // (STRIP_ROWS * n) // HEAD_STRIPS * HEAD_STRIPS
    step = min(BLOCK_STRIPS, max(few, round_up(available_threads(), HEAD_STRIPS)))
    return (slice(first, min(first + step, size)) for first in range(0, size, step))
