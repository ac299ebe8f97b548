"""Architectures: the tensors, packed weights, buffers and forward program of a model family.

Shapes: T tokens of this pass, S cached positions, D dim, L layers, V vocab.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, KVFormat, copy_rows
from specdec.model_config import ModelConfig
from specdec.quant import WeightFormat, choose_weight_format
from specdec.quant.packed_matrix import LazyTable, Matrix, PackingOverflowError, convert, count_panels, pack_matrix, to_float32
from specdec.runtime.matmul_tile import LINE_WORDS, PANEL_ROWS
from specdec.runtime.memory import Arena, align_to_cache_line, copy_nonzero_pages, get_physical_memory_bytes, lazy_zeros, zeros
from specdec.runtime.op_program import Executor, Op, Program
from specdec.runtime.simd import Float32, Int64, round_up

LONG_ROPE_PREFIX = "long_"
Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
SHARD_SEPARATOR = ":"  # in front of the number of a matrix's shard, from 1 on
ROUTER_SUFFIXES, EXPERT_INFIXES = (".router", ".shared_gate"), (".experts_", ".k_b", ".v_b")  # latent attention has one per head
VOCAB_MATRICES = ("embedding", "classifier")  # matrices with a row for each token of the vocabulary


class PackedTensor(NamedTuple):
    """A matrix to pack out of one or more tensors.

    Attributes:
        tensors: Names of the tensors, each with an index of a layer or expert if it holds one matrix for each, else None.
        rows: Number of rows of each tensor.
        n: Number of columns.
        n_interleaved: Number of tensors whose panels alternate; 1: the tensors lie below each other.
    """

    tensors: tuple[tuple[str, int | None], ...]
    rows: tuple[int, ...]
    n: int
    n_interleaved: int = 1

    @property
    def n_panels(self) -> int:
        """Number of panels that the rows of all tensors fill."""
        return sum(map(count_panels, self.rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, padded to whole panels, and number of columns of the packed matrix."""
        return (self.n_panels * PANEL_ROWS, self.n)


class Shard(NamedTuple):
    """Consecutive rows of a matrix that are packed in the same weight format.

    first_panel and n_total_panels place the shard in the whole matrix, as in `Matrix`; both are 0 if it is the whole matrix.
    """

    tensor: PackedTensor
    weight_format: WeightFormat
    first_panel: int = 0
    n_total_panels: int = 0


class PackedVector(NamedTuple):
    """A vector, or a table of vectors, to pack out of one or more tensors, each padded to whole panels.

    Attributes:
        tensors: Names and layers, as in `PackedTensor`.
        sizes: Size of each tensor's vectors.
        interleaved: The tensors' panels alternate; else the tensors follow each other.
        n_rows: Number of vectors of a table; 0: this is a single vector.
    """

    tensors: tuple[tuple[str, int | None], ...]
    sizes: tuple[int, ...]
    interleaved: bool = False
    n_rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed array, with padding."""
        size = sum(round_up(size, PANEL_ROWS) for size in self.sizes)
        return (self.n_rows, size) if self.n_rows else (size,)


PackedTensors = dict[str, PackedTensor | PackedVector]


class FusedTensors(NamedTuple):
    """Names of tensors to pack into one matrix or vector, as far as a model has these tensors.

    Attributes:
        tensors: Names of the tensors.
        interleaved: Panels of the tensors alternate; else the tensors lie below each other.
        is_table: The tensors are tables of vectors; else 2-D tensors are matrices.
    """

    tensors: tuple[str, ...]
    interleaved: bool = False
    is_table: bool = False


def fuse_tensors(own: Shapes, fused: Mapping[str, FusedTensors], stored: Shapes, i: int | None = None) -> PackedTensors:
    """Return descriptions of the matrices and vectors to pack, by name: one for each tensor, or one for several fused tensors.

    A tensor with a matrix for each expert becomes one matrix with all of them below each other.

    Args:
        own: Shapes of the tensors, without the axis of layers.
        fused: Tensors to fuse, by the name of the fused matrix or vector.
        stored: Shapes in the file, where a tensor may hold one matrix for each layer.
        i: Layer; its number precedes the names. None: tensors of no layer.
    """
    fused_names = {name: fused_name for fused_name, group in fused.items() for name in group.tensors}

    def locate(name: str) -> tuple[str, int | None]:
        return (f"{i}.{name}", None) if f"{i}.{name}" in stored else (name, i if stored[name] != own[name] else None)

    packed: PackedTensors = {}
    for fused_name in dict.fromkeys(fused_names.get(name, name) for name in own):
        group, packed_name = fused.get(fused_name, FusedTensors((fused_name,))), fused_name if i is None else f"{i}.{fused_name}"
        names = [name for name in group.tensors if name in own]
        (*lengths, n), sources = own[names[0]], tuple(map(locate, names))
        if group.is_table or not lengths:
            packed[packed_name] = PackedVector(sources, tuple(own[name][-1] for name in names), group.interleaved, *lengths)
            continue
        rows, n_interleaved = tuple(own[name][-2] for name in names), len(names) if group.interleaved else 1
        if len(lengths) > 1:
            rows, sources = rows * lengths[0], tuple((name, expert) for expert in range(lengths[0]) for name, _ in sources)
        packed[packed_name] = PackedTensor(sources, rows, n, n_interleaved)
    return packed


@dataclass(frozen=True)
class Weights:
    """A model's packed weights.

    Attributes:
        matrices: Packed matrices, by the architecture's names.
        vectors: Padded vectors, by the architecture's names.
        tables: Tables that stay in their files, by the names of the buffers that their rows are read into.
    """

    matrices: dict[str, Matrix]
    vectors: dict[str, Float32]
    tables: dict[str, LazyTable] = field(default_factory=dict)

    def get_shards(self, name: str) -> list[Matrix]:
        """Return the shards of the named matrix from top to bottom, one if its rows have one format; empty if there is none."""
        names = itertools.chain([name], (f"{name}{SHARD_SEPARATOR}{i}" for i in itertools.count(1)))
        return [*itertools.takewhile(bool, map(self.matrices.get, names))]  # type: ignore[list-item]

    def matmul(self, name: str, out: Float32, x: Float32, scratches: Sequence[Float32], *, unit: int = 1) -> list[Op]:
        """Return ops that compute out = W x for the matrix of this name, one per shard; scratches has an array for each shard."""
        shards = zip(self.get_shards(name), scratches, strict=False)
        return [shard.matmul(out, x, scratch, unit=unit) for shard, scratch in shards]

    def load_tokens(self, tokens: Sequence[int], buffers: "Buffers", at: int) -> None:
        """Write the tokens of a pass, and the tokens' rows of the lazy tables, into the buffers from row `at` on."""
        rows = slice(at, at + len(tokens))
        buffers.tokens[rows] = tokens
        for name, table in self.tables.items():
            getattr(buffers, name)[rows] = table.read_rows(tokens)

    @property
    def format_names(self) -> str:
        """Sorted names of the weight formats of all matrices, as text such as "bf16 and fp32"."""
        return " and ".join(sorted({matrix.weight_format.name for matrix in self.matrices.values()}))

    @property
    def n_bytes(self) -> int:
        """Size in bytes of all matrices and vectors; an array that serves as two matrices counts once."""
        arrays = [*(matrix.panels for matrix in self.matrices.values()), *self.vectors.values()]
        return sum({id(array): array.nbytes for array in arrays}.values())

    @property
    def array_ids(self) -> list[int]:
        """The `id` of each matrix's array, by which models that share weights are recognized."""
        return [id(matrix.panels) for matrix in self.matrices.values()]

    def estimate_bytes(self, weight_format: WeightFormat) -> int:
        """Return the bytes that the matrices would take after `convert` to another weight format; convert nothing."""
        return 4 * sum(_count_floats(len(m.panels), m.n, 0, to) for m, to in self._plan_conversion(weight_format).values())

    def convert(self, weight_format: WeightFormat, progress: Callable[[float], object] = lambda share: None) -> "Weights":
        """Return new weights with the matrices converted to another weight format, and with the same vectors and tables.

        Args:
            weight_format: The format; some matrices choose another one (`_choose_matrix_format`).
            progress: Callback that gets the fraction done.
        """
        arena = Arena(self.estimate_bytes(weight_format) // 4)
        converted, matrices = dict[int, Matrix](), self._plan_conversion(weight_format)
        for key, (matrix, to) in matrices.items():
            progress(arena.used_fraction)
            converted[key] = matrix if to is matrix.weight_format else convert(matrix, to, arena.allocate)
        return replace(self, matrices={name: converted[id(matrix)] for name, matrix in self.matrices.items()})

    def _plan_conversion(self, weight_format: WeightFormat) -> dict[int, tuple[Matrix, WeightFormat]]:
        """Return each distinct matrix, by its `id`, with the format that `convert` gives it."""
        return {
            id(matrix): (matrix, _choose_matrix_format(name, weight_format) or matrix.weight_format)
            for name, matrix in self.matrices.items()
        }

    def align(self) -> "Weights":
        """Return the same weights in arrays that begin at cache lines, copying those that do not."""
        aligned = {id(matrix): matrix.align_panels() for matrix in self.matrices.values()}
        vectors = {name: align_to_cache_line(vector) for name, vector in self.vectors.items()}
        return replace(self, matrices={name: aligned[id(matrix)] for name, matrix in self.matrices.items()}, vectors=vectors)


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


BufferScope = Literal["pass", "token", "sequence", "cache"]


class BufferSpec(NamedTuple):
    """Shape, dtype and scope of a buffer, an array that a program works in; a buffer that grows keeps its contents.

    Attributes:
        scope: "pass": any pass may overwrite it. "token": the same, and its last axis is the row of one token of a pass.
            "sequence": it belongs to one sequence, also in a pass over several. "cache": the same, and only written pages
            become resident, for arrays that most sequences do not fill.
    """

    shape: tuple[int, ...]
    dtype: type = np.float32
    scope: BufferScope = "pass"

    @property
    def is_per_sequence(self) -> bool:
        """Whether each sequence has an array of its own."""
        return self.scope in ("sequence", "cache")

    @property
    def token_bytes(self) -> int:
        """Distance in bytes between the rows of two consecutive tokens; 0 if the scope is not "token"."""
        if self.scope != "token":
            return 0
        return (self.shape[-1] if len(self.shape) > 1 else 1) * np.dtype(self.dtype).itemsize

    @property
    def n_bytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def allocate(self, old: Any = None) -> Any:
        """Return an array of zeros with the contents of `old` copied to its beginning; return `old` itself if its shape is right.

        Raises:
            MemoryError: If there is not enough memory.
        """
        if old is not None and old.shape == self.shape:
            return old
        if self.scope == "cache":
            new = lazy_zeros(self.dtype, *self.shape)
        else:
            new = zeros(*self.shape) if self.dtype is np.float32 else np.zeros(self.shape, self.dtype)
        if old is not None:
            self.copy(new[tuple(map(slice, old.shape))], old)
        return new

    def copy(self, to: Any, source: Any) -> None:
        """Copy all contents of `source` to `to`, two arrays of this spec; skip pages of zeros if the scope is "cache"."""
        if self.scope == "cache":
            copy_nonzero_pages(to, source)
        else:
            to[...] = source


class Buffers(SimpleNamespace):
    """The arrays that a forward program works in, as attributes: those of its architecture and those of every program.

    Arrays of every program:
        kv: The `KVFormat`.
        tokens, logits: (T,) and (T, V padded), of a pass.
        x: Residual stream (1, T, D padded).
        depths: (N,), of the nodes of a tree; after n tokens, a node's position is n + depth.
        paths: (N, N): for each node, the nodes on the path to it by depth, ending with the node itself.
        hidden_states: (S, layers D), of the cache's slots; only if hidden states are kept.

    An array with the prefix long_ replaces the one without it in sequences with long RoPE factors.
    """

    def with_long_rope(self) -> "Buffers":
        """Return buffers in which each array "long_<name>" replaces "<name>", for sequences with long RoPE factors."""
        long_arrays = {
            name.removeprefix(LONG_ROPE_PREFIX): array for name, array in vars(self).items() if name.startswith(LONG_ROPE_PREFIX)
        }
        return Buffers(**vars(self) | long_arrays)


@dataclass(frozen=True)
class SharedBuffers:
    """Buffers and executors that all caches of a model share.

    Attributes:
        buffers: Buffers that belong to no sequence.
        n_positions: Length of the longest sequence that the buffers are made for.
        executors: Executors by (n_positions, hidden layers); the second of each list, if any, is for long RoPE factors.
    """

    buffers: Buffers | None = None
    n_positions: int = 0
    executors: dict[tuple[int, tuple[int, ...]], list[Executor]] = field(default_factory=dict)


class ForwardProgram(NamedTuple):
    """A forward pass in parts: embed makes the residual stream x of tokens, each layer updates x, classify makes logits of x."""

    embed: Program
    layers: Sequence[Program]
    classify: Program

    def assemble(self, before: Mapping[int, Program]) -> Program:
        """Return the parts joined to one program, with extra programs inserted.

        Args:
            before: Program to run in front of the layer of each index; the index n_layers or n_layers + 1 stands for the place
                between the last layer and classify.
        """
        layers = enumerate([*self.layers, [], []])
        return [*self.embed, *(phase for i, layer in layers for phase in (*before.get(i, []), *layer)), *self.classify]


@dataclass(frozen=True)
class Architecture:
    """A model family.

    Attributes:
        shapes: Returns the shape of each tensor in a file of the family.
        packed_tensors: Returns the matrices and vectors to pack out of the tensors; includes "embedding" and "classifier".
        buffers: Returns the specs of the family's own buffers, next to those of every program (`Buffers`).
        program: Returns the forward pass over weights and buffers.
        fill_position_tables: Fills the buffers that depend on positions alone, such as RoPE tables, from a position on.
        learned_positions: Positions are a table in the file, which limits the length of a sequence.
        move_path: Moves the cache entries of a tree's path, given by its nodes from the top down, behind those of the first n
            tokens. None: the family runs no trees.
        n_rewindable_states: Number of last sequence lengths for which buffers hold the recurrent state. A sequence can be
            truncated by one token less; beyond that it runs again. The pass at position 0 takes no state. 0: no such state.
        split_by_layer: Returns each layer's buffers as its blocks name them, with keys and values. None: no memory of a sequence
            is released before its end.
        table_tensors: Returns the tensor that fills each buffer with rows of tokens, by buffer.
        make_features: Returns a draft head's program that makes x out of the target's hidden states in the buffer `taps`.
        final_norm: Returns the op that writes the last norm of x, of all tokens, to the buffer `normed`. None: the last norm
            cannot be requested as a hidden state.
    """

    shapes: Callable[[ModelConfig], Shapes]
    packed_tensors: Callable[[ModelConfig], PackedTensors]
    buffers: Callable[[ModelConfig, Weights, BufferSizes], dict[str, BufferSpec]]
    program: Callable[[ModelConfig, Weights, Buffers], ForwardProgram]
    fill_position_tables: Callable[[ModelConfig, Buffers, int], None] = lambda config, buffers, start: None
    learned_positions: bool = False
    move_path: Callable[[Buffers, Int64, int], None] | None = None
    n_rewindable_states: int = 0
    split_by_layer: Callable[[ModelConfig, Weights, Buffers], list[Buffers]] | None = None
    table_tensors: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    make_features: Callable[[ModelConfig, Weights, Buffers], Program] | None = None
    final_norm: Callable[[ModelConfig, Weights, Buffers], Op] | None = None

    def get_matrices(self, config: ModelConfig) -> dict[str, PackedTensor]:
        """Return the entries of `packed_tensors` that are matrices, by name."""
        return {name: each for name, each in self.packed_tensors(config).items() if isinstance(each, PackedTensor)}

    def get_vectors(self, config: ModelConfig) -> dict[str, PackedVector]:
        """Return the entries of `packed_tensors` that are vectors or tables of vectors, by name."""
        return {name: each for name, each in self.packed_tensors(config).items() if isinstance(each, PackedVector)}

    def get_buffer_specs(self, config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
        """Return the specs of all buffers of a model, by name: the family's own and those of every program."""
        hidden_states = BufferSpec((sizes.n_positions, sizes.n_hidden_layers * config.dim), scope="cache")
        kept = {"hidden_states": hidden_states} if sizes.n_hidden_layers else {}
        common = {
            "tokens": BufferSpec((MAX_BATCH_TOKENS,), np.int64, "token"),
            "depths": BufferSpec((MAX_BATCH_TOKENS,), np.int64, "sequence"),
            "paths": BufferSpec((MAX_BATCH_TOKENS, MAX_BATCH_TOKENS), np.int64, "sequence"),
            "x": BufferSpec((1, MAX_BATCH_TOKENS, round_up(config.dim, PANEL_ROWS)), scope="token"),
            "logits": BufferSpec((MAX_BATCH_TOKENS, weights.matrices["classifier"].n_rows), scope="token"),
        }
        return kept | common | self.buffers(config, weights, sizes)

    def allocate_buffers(
        self,
        config: ModelConfig,
        weights: Weights,
        sizes: BufferSizes,
        old: Buffers | None = None,
        shared: "SharedBuffers | None" = None,
    ) -> Buffers:
        """Return all buffers of a model, with position tables that are filled only as far as those in `shared` are.

        Per-sequence arrays get the contents of those in `old`. All others are those in `shared`, or larger copies of them.

        Raises:
            MemoryError: If there is not enough memory.
        """
        shared = shared or SharedBuffers()
        specs = self.get_buffer_specs(config, weights, sizes)
        shared_specs = self.get_buffer_specs(
            config, weights, sizes._replace(n_positions=max(sizes.n_positions, shared.n_positions))
        )
        sources = {
            name: (spec, old) if spec.is_per_sequence else (shared_specs[name], shared.buffers) for name, spec in specs.items()
        }
        return Buffers(
            kv=sizes.kv, **{name: spec.allocate(getattr(source, name, None)) for name, (spec, source) in sources.items()}
        )

    def grow_buffers(
        self, config: ModelConfig, weights: Weights, sizes: BufferSizes, old: Buffers | None, shared: "SharedBuffers"
    ) -> "tuple[Buffers, SharedBuffers]":
        """Return buffers of these sizes, with the contents of `old` and filled position tables, and the shared buffers.

        The shared buffers are replaced by new ones if the longest sequence has grown, else they are those given.
        """
        buffers = self.allocate_buffers(config, weights, sizes, old, shared)
        if sizes.n_positions > shared.n_positions:
            self.fill_position_tables(config, buffers, shared.n_positions)
            specs = self.get_buffer_specs(config, weights, sizes)
            arrays = {name: getattr(buffers, name) for name, spec in specs.items() if not spec.is_per_sequence}
            shared = SharedBuffers(Buffers(**arrays), sizes.n_positions)
        return buffers, shared

    def copy_sequence(self, config: ModelConfig, weights: Weights, sizes: BufferSizes, source: Buffers, to: Buffers) -> None:
        """Copy the per-sequence buffers from `source` to `to`, for the number of positions in `sizes`."""
        for name, spec in self.get_buffer_specs(config, weights, sizes).items():
            if spec.is_per_sequence:
                region = (*map(slice, spec.shape),)
                spec.copy(getattr(to, name)[region], getattr(source, name)[region])

    def make_executors(
        self,
        config: ModelConfig,
        weights: Weights,
        buffers: Buffers,
        sizes: BufferSizes,
        shared: SharedBuffers,
        layers: tuple[int, ...],
    ) -> list[Executor]:
        """Return the executor of normal sequences, and that of sequences with long RoPE factors if they differ.

        The executors keep hidden states before the given layers. They are stored in shared, so that each is made once.
        """
        specs = [(getattr(buffers, name), spec) for name, spec in self.get_buffer_specs(config, weights, sizes).items()]
        own_arrays = [array for array, spec in specs if spec.is_per_sequence]
        if existing := shared.executors.get((sizes.n_positions, layers)):
            return [executor.with_sequence_arrays(own_arrays) for executor in existing]
        token_arrays = [(array, spec.token_bytes) for array, spec in specs if spec.token_bytes]
        copies = dict[int, Program]()
        for i, layer in enumerate(layers):
            normed = [self.final_norm(config, weights, buffers)] if layer > config.n_layers and self.final_norm else []
            source = buffers.normed if normed else buffers.x
            copies[layer] = [[*normed, copy_rows(buffers.hidden_states, source, i * config.dim, 0, config.dim, True)]]
        variants = [buffers, buffers.with_long_rope()][: 1 + (config.rope.longrope_threshold > 0)]
        executors = [
            Executor(self.program(config, weights, each).assemble(copies), own_arrays, token_arrays) for each in variants
        ]
        shared.executors[sizes.n_positions, layers] = [executor.without_sequence_arrays() for executor in executors]
        return executors

    def make_shards(
        self, config: ModelConfig, tensors: Mapping[str, Any], weight_format: WeightFormat | None
    ) -> dict[str, Shard]:
        """Return all shards by name; a matrix of tensors with different block types has a shard for each run of equal types.

        weight_format is as in `pack`.
        """
        shards = {}
        for name, matrix in self.get_matrices(config).items():
            ts = [get_tensor(tensors, *source) for source in matrix.tensors]
            matrix_format = weight_format and _choose_matrix_format(name, weight_format)
            types = [getattr(tensor, "type", "") for tensor in ts]
            if matrix.n_interleaved > 1 or len({*types}) == 1:
                shards[name] = Shard(matrix, choose_weight_format(ts, matrix_format))
                continue
            for i, run in enumerate(_find_runs(types)):
                part = PackedTensor(matrix.tensors[run], matrix.rows[run], matrix.n)
                first_panel = sum(map(count_panels, matrix.rows[: run.start]))
                shards[name + f"{SHARD_SEPARATOR}{i}" * (i > 0)] = Shard(
                    part, choose_weight_format(ts[run], matrix_format), first_panel, matrix.n_panels
                )
        return shards

    def estimate_bytes(self, config: ModelConfig, tensors: Mapping[str, Any], weight_format: WeightFormat | None = None) -> int:
        """Return the bytes of the matrices that `pack` would make, without reading the tensors' data."""
        return sum(self.count_matrix_bytes(config, tensors, weight_format).values())

    def count_matrix_bytes(
        self, config: ModelConfig, tensors: Mapping[str, Any], weight_format: WeightFormat | None = None
    ) -> dict[str, int]:
        """Return the bytes of each matrix as in `estimate_bytes`, by name; a tied embedding counts as the classifier."""
        sizes = dict[PackedTensor, tuple[str, int]]()
        for name, (matrix, own, *_) in self.make_shards(config, tensors, None).items():
            own = (weight_format and _choose_matrix_format(name, weight_format)) or own
            group = getattr(get_tensor(tensors, *matrix.tensors[0]), "group", 0)
            sizes[matrix] = name, 4 * _count_floats(matrix.n_panels, matrix.n, group, own)
        return dict(sizes.values())

    def make_placeholder_weights(
        self, config: ModelConfig, tensors: Mapping[str, Any], weight_format: WeightFormat | None = None
    ) -> Weights:
        """Return weights like those of `pack` with empty matrices and zero vectors: enough to make the program."""
        matrices = {
            name: Matrix(
                own,
                np.empty((matrix.n_panels, 0, 0), np.float32),
                matrix.n,
                own.get_group_size(matrix.n, 0),
                *position,
            )
            for name, (matrix, own, *position) in self.make_shards(config, tensors, weight_format).items()
        }
        # Making a program computes with vectors, so these need data.
        return Weights(matrices, {name: zeros(*vector.shape) for name, vector in self.get_vectors(config).items()})

    def pack(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Any],
        weight_format: WeightFormat | None = None,
        progress: Callable[[float], object] = lambda share: None,
        keep: Callable[[Float32, str], object] = lambda array, format_name: None,
    ) -> Weights:
        """Return the model's weights: its tensors, in the shapes of `shapes`, packed into the layout that the kernels read.

        Args:
            config: Config of the model.
            tensors: Tensors by name; indexed by layer, then by a slice of rows, a block at a time, so they may lie in a file.
            weight_format: Format of float tensors; None: each keeps its own.
            progress: Callback that gets the fraction done.
            keep: Callback that gets each array of the result, in the order that `arrange` takes, and the name of its weight
                format ("" for a vector).

        Raises:
            ValueError: If a matrix has another shape than the config needs.
            MemoryError: If the machine's memory cannot hold the weights.
        """
        shards = self.make_shards(config, tensors, weight_format)
        formats = {shard.tensor: shard.weight_format for shard in shards.values()}
        sources = {matrix: [get_tensor(tensors, *source) for source in matrix.tensors] for matrix in formats}
        for matrix, ts in sources.items():
            for (name, _), rows, tensor in zip(matrix.tensors, matrix.rows, ts, strict=True):
                if tuple(tensor.shape) != (rows, matrix.n):  # the kernels do not check bounds
                    raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; this config needs {(rows, matrix.n)}")
        n_bytes = 4 * sum(
            _count_floats(each.n_panels, each.n, getattr(ts[0], "group", 0), formats[each]) for each, ts in sources.items()
        )
        if n_bytes > (n_physical := get_physical_memory_bytes()):
            raise MemoryError(
                f"its weights take {n_bytes / 2**30:.2f} GiB; this machine has {n_physical / 2**30:.2f} GiB of memory"
            )
        arena = Arena(n_bytes // 4, sum(_count_fallback_floats(matrix, formats[matrix]) for matrix in sources))
        matrices = {}
        for matrix, ts in sources.items():
            n_used, fallback = arena.n_used, formats[matrix].fallback

            def report(share: float, begin: float = arena.used_fraction) -> None:
                progress(begin + share * (arena.used_fraction - begin))

            try:
                matrices[matrix] = pack_matrix(ts, formats[matrix], matrix.n_interleaved, arena.allocate, report)
            except PackingOverflowError:
                assert fallback
                arena.release_from(n_used)
                matrices[matrix] = pack_matrix(ts, fallback, matrix.n_interleaved, arena.allocate)
            keep(matrices[matrix].panels, matrices[matrix].weight_format.name)
        vectors = {name: _pack_vector(vector, tensors) for name, vector in self.get_vectors(config).items()}
        for vector in vectors.values():
            keep(vector, "")
        return self._make_weights(config, tensors, shards, matrices, vectors)

    def arrange(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Any],
        weight_format: WeightFormat | None,
        arrays: Sequence[Float32],
        formats: Sequence[str],
    ) -> Weights:
        """Return the weights that `pack` returns, made of its arrays, which `keep` got; reads no tensors.

        Args:
            config: Config of the model.
            tensors: Tensors by name, as in `pack`.
            weight_format: As in `pack`.
            arrays: The arrays, flat.
            formats: Name of the weight format of each array.
        """
        shards = self.make_shards(config, tensors, weight_format)
        own_formats = {shard.tensor: shard.weight_format for shard in shards.values()}
        matrices, remaining = dict[PackedTensor, Matrix](), iter(zip(arrays, formats, strict=True))
        for matrix, own in own_formats.items():
            array, name = next(remaining)
            used = own.fallback if own.fallback and own.name != name else own
            group_size = used.get_group_size(matrix.n, getattr(get_tensor(tensors, *matrix.tensors[0]), "group", 0))
            panels = array.reshape(matrix.n_panels, *used.get_panel_shape(matrix.n, group_size))
            matrices[matrix] = Matrix(used, panels, matrix.n, group_size)
        vectors = {
            name: array.reshape(vector.shape)
            for (name, vector), (array, _) in zip(self.get_vectors(config).items(), remaining, strict=True)
        }
        return self._make_weights(config, tensors, shards, matrices, vectors)

    def _make_weights(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Any],
        shards: Mapping[str, Shard],
        matrices: Mapping[PackedTensor, Matrix],
        vectors: dict[str, Float32],
    ) -> Weights:
        """Return weights out of the packed matrices and vectors, and the tables that stay in their files."""
        return Weights(
            {name: matrices[matrix].place(*source) for name, (matrix, _, *source) in shards.items()},
            vectors,
            {name: LazyTable(tensors[stored]) for name, stored in self.table_tensors(config).items()},
        )

    def check(self, config: ModelConfig, weights: Weights) -> None:
        """Raise ValueError if a weight has another shape than the config needs, is missing or is unknown."""
        expected = self.packed_tensors(config)
        shards = {name: weights.get_shards(name) for name in expected}
        found = {name: (sum(each.n_rows for each in own), *{each.n for each in own}) for name, own in shards.items() if own}
        found |= {name: vector.shape for name, vector in weights.vectors.items()}
        for name, packed in expected.items():
            if found.get(name) != packed.shape:
                problem = f"has the shape {found[name]}" if name in found else "is missing"
                raise ValueError(f"{name} of the weights {problem}; the config needs the shape {packed.shape}")
        if extra := {
            name for name in (*weights.matrices, *weights.vectors) if name.partition(SHARD_SEPARATOR)[0] not in expected
        }:
            raise ValueError(f"{min(extra)} of the weights is unknown to the config")


def _choose_matrix_format(name: str, weight_format: WeightFormat) -> WeightFormat | None:
    """Return the format of the named matrix in a model with this weight format. None: it is a router, which keeps its own."""
    if name in VOCAB_MATRICES:
        return weight_format.embedding_format or weight_format
    if name.endswith(ROUTER_SUFFIXES):
        return None
    return weight_format.expert_format or weight_format if any(each in name for each in EXPERT_INFIXES) else weight_format


def _find_runs(types: Sequence[str]) -> list[slice]:
    """Split a sequence of types into runs of equal ones and return the slice of each run."""
    edges = [0, *(i for i in range(1, len(types)) if types[i] != types[i - 1]), len(types)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def get_tensor(tensors: Mapping[str, Any], name: str, layer: int | None) -> Any:
    """Return a tensor by its name, or the matrix of a layer or an expert in it."""
    return tensors[name] if layer is None else tensors[name][layer]


def _count_floats(n_panels: int, n: int, group: int, weight_format: WeightFormat) -> int:
    """Return the 4-byte words that a packed matrix takes in an `Arena`; group: as `get_group_size` takes it."""
    shape = weight_format.get_panel_shape(n, weight_format.get_group_size(n, group))
    return int(round_up(n_panels * math.prod(shape), LINE_WORDS))


def _count_fallback_floats(packed: PackedTensor, weight_format: WeightFormat) -> int:
    """Return how many more 4-byte words a matrix takes in the fallback of a weight format than in the format itself, or 0."""
    formats = (weight_format.fallback or weight_format, weight_format)
    fallback, own = (_count_floats(packed.n_panels, packed.n, 0, each) for each in formats)
    return max(fallback - own, 0)


def _pack_vector(vector: PackedVector, tensors: Mapping[str, Any]) -> Float32:
    out, at = zeros(*vector.shape), 0
    for i, (source, size) in enumerate(zip(vector.tensors, vector.sizes, strict=True)):
        padded = zeros(*vector.shape[:-1], round_up(size, PANEL_ROWS))
        padded[..., :size] = to_float32(get_tensor(tensors, *source)[:])
        if vector.interleaved:
            out.reshape(-1, len(vector.sizes), PANEL_ROWS)[:, i] = padded.reshape(-1, PANEL_ROWS)
        else:
            out[..., at : at + padded.shape[-1]] = padded
        at += padded.shape[-1]
    return out
