"""Buffers: the arrays that a forward program works in, those of passes and those of one sequence.

Shapes: T tokens of this pass, S cached positions, D dim, L layers, V vocab, G KV heads, K head dim, R rows of a panel.
"""

import copy
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, KVFormat, move_kv_slots
from specdec.quant.packed_matrix import LazyTable
from specdec.runtime.memory import LazyMemory, copy_nonzero_pages, zeros
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import PANEL_ROWS, Array, Float32, Int64, ceil_div, round_up

PLAN_ITEM = bytes(8)  # each item of an array without memory


def pad(n: int) -> int:
    """Return n rows, rounded up to whole panels."""
    return int(round_up(n, PANEL_ROWS))


class BufferSizes(NamedTuple):
    """The quantities, in addition to config and weights, on which the shapes of a model's buffers depend.

    Attributes:
        kv: Format of the KV cache.
        n_positions: Length of the longest sequence, rounded up to whole panels of positions.
        n_threads: Number of threads of a pass.
        n_hidden_layers: Number of layers whose hidden states are kept.
    """

    kv: KVFormat
    n_positions: int
    n_threads: int
    n_hidden_layers: int = 0


class SequenceArray(NamedTuple):
    """An array of one sequence.

    Attributes:
        array: The array.
        positions_axis: Axis that grows with the sequence; None: its size is fixed.
        positions_per_index: Number of positions per index of that axis.
    """

    array: Array
    positions_axis: int | None = None
    positions_per_index: int = 1

    def select(self, first: int, end: int) -> Array:
        """Return a view of positions first to end (exclusive), whole indexes of the axis; of all of an array of fixed size."""
        if self.positions_axis is None:
            return self.array
        part = slice(first // self.positions_per_index, ceil_div(end, self.positions_per_index))
        return self.array[(*[slice(None)] * self.positions_axis, part)]

    def copy_to(self, other: Array) -> None:
        """Copy the contents, often zeros at the end, to the beginning of a larger array, or to one of the same shape."""
        copy_nonzero_pages(other[tuple(map(slice, self.array.shape))], self.array)


class KVState(NamedTuple):
    """Keys and values of one attention layer: keys (G, S / R, K, R), values (G, ceil(K / R), S, R), their scales (G, S or 0).

    Latent attention has no keys: a row of values is the key, too.
    """

    keys: Float32
    values: Float32
    key_scales: Float32
    value_scales: Float32


class ScanState(NamedTuple):
    """State of a delta net or a Mamba-2 layer: see `recurrent_ops.DeltaNetArgs` and `recurrent_ops.Mamba2Args`."""

    states: Float32
    lengths: Int64
    keys: Float32
    deltas: Float32
    decays: Float32


class RopeTables(NamedTuple):
    """RoPE's tables cos and sin (S, K + LANES): entry j belongs to row j % K of a head; see `fill_rope_tables`."""

    cos: Float32
    sin: Float32


@dataclass
class LayerBuffers:
    """The arrays of one layer that outlive a pass.

    Attributes:
        kv: The KV cache that the layer reads: its own, or that of another layer.
        ring: The ring (N, channels) of the inputs of a mixer's convolution.
        scan: State of a mixer's scan.
        rope: RoPE tables.
        query_rope: RoPE tables of queries, if they differ.
    """

    kv: KVState | None = None
    ring: Float32 | None = None
    scan: ScanState | None = None
    rope: RopeTables | None = None
    query_rope: RopeTables | None = None


@dataclass
class SharedBuffers:
    """The arrays that all caches of a model share.

    Attributes:
        arrays: Arrays of passes, by what uses them, the order of its calls, shape and dtype.
        ropes: RoPE tables, by what their angles depend on.
        executors: Executors by (n_positions, hidden layers); the second of each list, if any, is for long RoPE factors.
    """

    arrays: dict[Hashable, Array] = field(default_factory=dict)
    ropes: dict[Hashable, RopeTables] = field(default_factory=dict)
    executors: dict[tuple[int, tuple[int, ...]], list[Executor]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Size in bytes of all arrays and RoPE tables."""
        tables = (table for rope in self.ropes.values() for table in rope)
        return sum(array.nbytes for array in (*self.arrays.values(), *tables))


class Allocator:
    """Makes the arrays of one sequence, and finds or makes the arrays of passes, which all layers and sequences share.

    Args:
        shared: The shared arrays.
        old: The arrays of the same sequence before it grew, in the order in which this allocator makes them.
        is_plan: Make arrays of the right shapes without memory, to count bytes or to list the kernels of a program.

    Attributes:
        shared: The shared arrays.
        own: The arrays of the sequence so far.
        token_arrays: The arrays that `rows` returned, by their `id`, each with the bytes from one row to the next.
        is_plan: Whether the arrays have no memory.
    """

    def __init__(self, shared: SharedBuffers | None = None, old: Iterable[SequenceArray] = (), *, is_plan: bool = False) -> None:
        """Make an allocator that has made no array yet."""
        self.shared = shared or SharedBuffers()
        self.own = list[SequenceArray]()
        self.is_plan = is_plan
        self._old = deque(old)  # dropped as they are replaced
        self._lazy = LazyMemory()
        self.token_arrays = dict[int, tuple[Array, int]]()
        self._user: object = None
        self._n_taken = 0  # arrays of passes

    def share(self, user: object) -> "Allocator":
        """Return an allocator that makes the arrays of passes of one of several users that run one after another.

        It returns the arrays that the other users got, in the order of the calls.

        Args:
            user: What they have in common, such as a class of blocks.
        """
        other = copy.copy(self)
        other._user, other._n_taken = user, 0
        return other

    def rows(self, width: int, copies: int = 0) -> Array:
        """Return an array (T, width), or (copies, T, width), of passes: any pass may overwrite it."""
        shape = (copies, MAX_BATCH_TOKENS, width) if copies else (MAX_BATCH_TOKENS, width)
        array = self.scratch(*shape)
        self.token_arrays[id(array)] = array, array.shape[-1] * array.itemsize
        return array

    def scratch(self, *shape: int, dtype: type = np.float32) -> Array:
        """Return an array of passes of any other shape; see `rows`."""
        key = self._user, self._n_taken, shape, dtype
        self._n_taken += 1
        if key not in self.shared.arrays:
            self.shared.arrays[key] = self.make(shape, dtype)
        return self.shared.arrays[key]

    def scores(self, *shape: int) -> Float32:
        """Return scratch for attention scores (..., S), of this shape or with more positions."""
        found = self.shared.arrays.get(Allocator.scores)
        if found is None or found.shape[-1] < shape[-1]:
            self.shared.executors.clear()  # they use the smaller array
            found = self.shared.arrays[Allocator.scores] = self.make(shape, np.float32)
        return found

    def sequence(self, *shape: int, dtype: type = np.float32, positions_axis: int | None = None, per_index: int = 1) -> Array:
        """Return an array that belongs to the sequence: the old one, or a larger one with its contents; see `SequenceArray`.

        Raises:
            MemoryError: If there is not enough memory.
        """
        old = self._old.popleft() if self._old else None
        if old and old.array.shape == shape:
            array = old.array
        else:
            array = self.make(shape, dtype) if self.is_plan else self._lazy.zeros(shape, dtype)
            if old:
                old.copy_to(array)
        self.own.append(SequenceArray(array, positions_axis, per_index))
        return array

    def make(self, shape: Sequence[int], dtype: type = np.float32) -> Array:
        """Return a new array of zeros, or in a plan one without memory."""
        if self.is_plan:
            return np.ndarray(shape, dtype, PLAN_ITEM, strides=(0,) * len(shape))
        return zeros(*shape) if dtype is np.float32 else np.zeros(shape, dtype)


@dataclass
class Buffers:
    """The arrays that a forward program works in.

    Attributes:
        sizes: The sizes that the arrays are made for.
        new: Makes further arrays of passes for the blocks.
        tokens: Tokens of a pass (T,).
        logits: (T, V padded).
        x: Residual stream (1, T, D padded).
        normed: (threads, T, D padded).
        scratches: Activations in the form that a weight format needs, one array (threads, T, words) per shard of a matrix.
        scores: Attention scores of one head (threads, MAX_TILE_TOKENS, S).
        experts_read: Number of experts that the last pass has read in each layer (L,).
        depths: Depths of the nodes of a tree (N,); after n tokens, a node's position is n + depth.
        paths: (N, N): for each node, the nodes on the path to it by depth, ending with the node itself.
        layers: What the layers keep between passes.
        hidden_states: (S, layers D), of the cache's slots; only if hidden states are kept.
        long_rope: RoPE tables of sequences with long factors, if there are any.
        token_rows: The tokens' rows of the table that stays in its file (T, L P), if there is one.
        layer_inputs: The per-layer inputs of all layers (T, L P padded), if there are any.
    """

    sizes: BufferSizes
    new: Allocator
    tokens: Int64
    logits: Float32
    x: Float32
    normed: Float32
    scratches: list[Float32]
    scores: Float32
    experts_read: Int64
    depths: Int64
    paths: Int64
    layers: list[LayerBuffers]
    hidden_states: Float32 | None = None
    long_rope: RopeTables | None = None
    token_rows: Float32 | None = None
    layer_inputs: Float32 | None = None

    @property
    def scratch(self) -> Float32:
        """Scratch of a matrix with one shard."""
        return self.scratches[0]

    @property
    def rings(self) -> list[Float32]:
        """The rings of all mixers, in the order of layers."""
        return [layer.ring for layer in self.layers if layer.ring is not None]

    @property
    def scans(self) -> list[ScanState]:
        """The states of all scans, in the order of layers."""
        return [layer.scan for layer in self.layers if layer.scan]

    @property
    def growing(self) -> list[SequenceArray]:
        """The arrays of the sequence that grow with its length, such as keys and values."""
        return [each for each in self.new.own if each.positions_axis is not None]

    def load_tokens(self, tokens: Sequence[int], table: LazyTable | None, at: int) -> None:
        """Write the tokens of a pass, and their rows of the table that stays in its file, from row `at` on."""
        rows = slice(at, at + len(tokens))
        self.tokens[rows] = tokens
        if table:
            assert self.token_rows is not None
            self.token_rows[rows] = table.read_rows(tokens)

    def copy_sequence(self, other: "Buffers", n: int) -> None:
        """Copy the first n positions, whole panels, and all arrays of fixed size, of the sequence in other buffers."""
        for to, source in zip(self.new.own, other.new.own, strict=True):
            source._replace(array=source.select(0, n)).copy_to(to.array)

    def move_path(self, path: Int64, n_tokens: int) -> None:
        """Move what is cached of a tree's path to the slots behind the first n_tokens.

        path: Indexes of the tree's nodes on the path, from the top down.
        """
        for kv in {id(layer.kv): layer.kv for layer in self.layers if layer.kv}.values():  # layers may share one
            move_kv_slots(*kv, path, n_tokens)
        if self.hidden_states is not None:
            self.hidden_states[n_tokens : n_tokens + len(path)] = self.hidden_states[n_tokens + path]
