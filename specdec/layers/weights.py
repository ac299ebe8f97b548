"""Packed weights: which tensors each matrix and vector is made of, in which weight format it is packed, and the result.

Shapes: D dim, L layers, V vocab.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from specdec.quant import WeightFormat, choose_weight_format
from specdec.quant.packed_matrix import LazyTable, Matrix, PackingOverflowError, convert, count_panels, pack_matrix, to_float32
from specdec.runtime.memory import Arena, align_to_cache_line, get_physical_memory_bytes, zeros
from specdec.runtime.simd import LINE_WORDS, PANEL_ROWS, Float32, round_up

Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
Tensors = Mapping[str, Any]  # by name: a `Tensor`, or one that holds a `Tensor` for each layer or expert
ROUTER_SUFFIXES = (".router", ".shared_gate")
EXPERT_INFIXES = (".experts_", ".k_b", ".v_b")  # latent attention has one matrix per head
TOKEN_TABLE = "input_rows"  # tensor with a row for each token that stays in its file
VOCAB_MATRICES = ("embedding", "classifier")  # matrices with a row for each token of the vocabulary


class MatrixPlan(NamedTuple):
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

    plan: MatrixPlan
    weight_format: WeightFormat
    first_panel: int = 0
    n_total_panels: int = 0


class VectorPlan(NamedTuple):
    """A vector, or a table of vectors, to pack out of one or more tensors, each padded to whole panels.

    Attributes:
        tensors: Names and layers, as in `MatrixPlan`.
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


Plans = dict[str, MatrixPlan | VectorPlan]


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


FusedNames = Mapping[str, FusedTensors]  # by the name of the fused matrix or vector


def fuse_tensors(own: Shapes, fused: FusedNames, stored: Shapes, i: int | None = None) -> Plans:
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

    plans: Plans = {}
    for fused_name in dict.fromkeys(fused_names.get(name, name) for name in own):
        group = fused.get(fused_name, FusedTensors((fused_name,)))
        packed_name = fused_name if i is None else f"{i}.{fused_name}"
        names = [name for name in group.tensors if name in own]
        (*lengths, n), sources = own[names[0]], tuple(map(locate, names))
        if group.is_table or not lengths:
            plans[packed_name] = VectorPlan(sources, tuple(own[name][-1] for name in names), group.interleaved, *lengths)
            continue
        rows, n_interleaved = tuple(own[name][-2] for name in names), len(names) if group.interleaved else 1
        if len(lengths) > 1:
            rows, sources = rows * lengths[0], tuple((name, expert) for expert in range(lengths[0]) for name, _ in sources)
        plans[packed_name] = MatrixPlan(sources, rows, n, n_interleaved)
    return plans


@dataclass(frozen=True)
class Weights:
    """A model's packed weights.

    Attributes:
        shards: The shards of each packed matrix from top to bottom, by the architecture's names; one if its rows have one format.
        vectors: Padded vectors, by the architecture's names.
        table: Table with a row for each token that stays in its file.
    """

    shards: dict[str, tuple[Matrix, ...]]
    vectors: dict[str, Float32]
    table: LazyTable | None = None

    @functools.cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The packed matrices by name; of a matrix in several shards, the top one."""
        return {name: shards[0] for name, shards in self.shards.items()}

    def iter_matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Iterate over the names and shards of all matrices."""
        return ((name, shard) for name, shards in self.shards.items() for shard in shards)

    @functools.cached_property
    def scratch_words(self) -> int:
        """Words of scratch per token that any matmul needs."""
        return max(matrix.scratch_words for _, matrix in self.iter_matrices())

    @property
    def format_names(self) -> str:
        """Sorted names of the weight formats of all matrices, as text such as "bf16 and fp32"."""
        return " and ".join(sorted({matrix.weight_format.name for _, matrix in self.iter_matrices()}))

    @property
    def n_bytes(self) -> int:
        """Size in bytes of all matrices and vectors; an array that serves as two matrices counts once."""
        arrays = [*(matrix.panels for _, matrix in self.iter_matrices()), *self.vectors.values()]
        return sum({id(array): array.nbytes for array in arrays}.values())

    def estimate_bytes(self, weight_format: WeightFormat) -> int:
        """Return the bytes that the matrices would take after `convert` to another weight format; convert nothing."""
        return 4 * sum(_count_floats(len(m.panels), m.n, 0, to) for m, to in self._plan_conversion(weight_format).values())

    def convert(self, weight_format: WeightFormat, progress: Callable[[float], object] = lambda share: None) -> "Weights":
        """Return new weights with the matrices converted to another weight format, and with the same vectors and table.

        Args:
            weight_format: The format; some matrices choose another one (`_choose_matrix_format`).
            progress: Callback that gets the fraction done.
        """
        arena = Arena(self.estimate_bytes(weight_format) // 4)
        converted = dict[int, Matrix]()
        for key, (matrix, to) in self._plan_conversion(weight_format).items():
            progress(arena.used_fraction)
            converted[key] = matrix if to is matrix.weight_format else convert(matrix, to, arena.allocate)
        return self._replace_matrices(converted)

    def _plan_conversion(self, weight_format: WeightFormat) -> dict[int, tuple[Matrix, WeightFormat]]:
        """Return each distinct matrix, by its `id`, with the format that `convert` gives it."""
        return {
            id(matrix): (matrix, _choose_matrix_format(name, weight_format) or matrix.weight_format)
            for name, matrix in self.iter_matrices()
        }

    def align(self) -> "Weights":
        """Return the same weights in arrays that begin at cache lines, copying those that do not."""
        aligned = self._replace_matrices({id(matrix): matrix.align_panels() for _, matrix in self.iter_matrices()})
        return replace(aligned, vectors={name: align_to_cache_line(vector) for name, vector in self.vectors.items()})

    def _replace_matrices(self, new: Mapping[int, Matrix]) -> "Weights":
        """Return the same weights with other matrices, which are given by the `id` of the matrix that each replaces."""
        return replace(self, shards={name: tuple(new[id(each)] for each in shards) for name, shards in self.shards.items()})


@dataclass(frozen=True)
class WeightPlan:
    """The weights of a model before they are packed: where each comes from, and in which weight format it is packed.

    Attributes:
        plans: Matrices and vectors to pack, by name.
        tensors: Tensors by name; indexed by layer, then by a slice of rows, a block at a time, so they may lie in a file.
        weight_format: Format of float tensors; None: each keeps its own.
        table: Name of the tensor that stays in its file, or "".
    """

    plans: Plans
    tensors: Tensors
    weight_format: WeightFormat | None = None
    table: str = ""

    @property
    def vectors(self) -> dict[str, VectorPlan]:
        """The entries of `plans` that are vectors or tables of vectors, by name."""
        return {name: plan for name, plan in self.plans.items() if isinstance(plan, VectorPlan)}

    @property
    def format_names(self) -> tuple[str, ...]:
        """The names of the weight formats of all shards, in order."""
        return tuple(shard.weight_format.name for shards in self.shards.values() for shard in shards)

    @functools.cached_property
    def shards(self) -> dict[str, list[Shard]]:
        """The shards of each matrix; a matrix of tensors with different block types has one for each run of equal types."""
        shards = dict[str, list[Shard]]()
        for name, plan in self.plans.items():
            if isinstance(plan, VectorPlan):
                continue
            ts = [get_tensor(self.tensors, *source) for source in plan.tensors]
            wanted = self.weight_format and _choose_matrix_format(name, self.weight_format)
            types = [getattr(tensor, "type", "") for tensor in ts]
            runs = [slice(None)] if plan.n_interleaved > 1 else _find_runs(types)
            formats = [choose_weight_format(ts[run], wanted) for run in runs]
            if all(each is formats[0] for each in formats):
                shards[name] = [Shard(plan, formats[0])]
                continue
            shards[name], first_panel = [], 0
            for run, weight_format in zip(runs, formats, strict=True):
                part = MatrixPlan(plan.tensors[run], plan.rows[run], plan.n)
                shards[name].append(Shard(part, weight_format, first_panel, plan.n_panels))
                first_panel += part.n_panels
        return shards

    @property
    def _formats(self) -> dict[MatrixPlan, WeightFormat]:
        """The weight format of each distinct shard."""
        return {shard.plan: shard.weight_format for shards in self.shards.values() for shard in shards}

    def estimate_bytes(self, weight_format: WeightFormat | None = None) -> int:
        """Return the bytes of the matrices that `pack` would make, without reading the tensors' data."""
        return sum(self.count_matrix_bytes(weight_format).values())

    def count_matrix_bytes(self, weight_format: WeightFormat | None = None) -> dict[str, int]:
        """Return the bytes of each matrix, by name; a tied embedding counts as the classifier.

        Args:
            weight_format: The weight format to plan for; None: the plan's own.
        """
        sizes = dict[MatrixPlan, tuple[str, int]]()
        planned = replace(self, weight_format=weight_format) if weight_format else self
        for name, shards in planned.shards.items():
            for plan, used, *_ in shards:
                sizes[plan] = name, 4 * _count_floats(plan.n_panels, plan.n, self._get_group(plan), used)
        n_bytes = dict[str, int]()
        for name, size in sizes.values():
            n_bytes[name] = n_bytes.get(name, 0) + size
        return n_bytes

    def _get_group(self, plan: MatrixPlan) -> int:
        """Return the number of weights of a matrix that share a scale in the file; 0: none do."""
        return int(getattr(get_tensor(self.tensors, *plan.tensors[0]), "group", 0))

    def make_placeholders(self) -> Weights:
        """Return weights like those of `pack` with empty matrices and zero vectors: enough to make the program."""
        matrices = {
            plan: Matrix(own, np.empty((plan.n_panels, 0, 0), np.float32), plan.n, own.get_group_size(plan.n, 0))
            for plan, own in self._formats.items()
        }
        # Making a program computes with vectors, so these need data.
        return self._make_weights(matrices, {name: zeros(*vector.shape) for name, vector in self.vectors.items()})

    def pack(
        self,
        progress: Callable[[float], object] = lambda share: None,
        keep: Callable[[Float32, str], object] = lambda array, format_name: None,
    ) -> Weights:
        """Return the model's weights: its tensors packed into the layout that the kernels read.

        Args:
            progress: Callback that gets the fraction done.
            keep: Callback that gets each array of the result, in the order that `arrange` takes, and the name of its weight
                format ("" for a vector).

        Raises:
            ValueError: If a matrix has another shape than the config needs.
            MemoryError: If the machine's memory cannot hold the weights.
        """
        formats = self._formats
        sources = {plan: [get_tensor(self.tensors, *source) for source in plan.tensors] for plan in formats}
        for plan, ts in sources.items():
            for (name, _), rows, tensor in zip(plan.tensors, plan.rows, ts, strict=True):
                if tuple(tensor.shape) != (rows, plan.n):  # the kernels do not check bounds
                    raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; this config needs {(rows, plan.n)}")
        n_floats = sum(_count_floats(plan.n_panels, plan.n, self._get_group(plan), own) for plan, own in formats.items())
        if 4 * n_floats > (n_physical := get_physical_memory_bytes()):
            raise MemoryError(
                f"its weights take {4 * n_floats / 2**30:.2f} GiB; this machine has {n_physical / 2**30:.2f} GiB of memory"
            )
        arena = Arena(n_floats, sum(_count_fallback_floats(plan, own) for plan, own in formats.items()))
        matrices = {}
        for plan, ts in sources.items():
            n_used, own, fallback = arena.n_used, formats[plan], formats[plan].fallback

            def report(share: float, begin: float = arena.used_fraction) -> None:
                progress(begin + share * (arena.used_fraction - begin))

            try:
                matrices[plan] = pack_matrix(ts, own, plan.n_interleaved, arena.allocate, report)
            except PackingOverflowError:
                assert fallback
                arena.release_from(n_used)
                matrices[plan] = pack_matrix(ts, fallback, plan.n_interleaved, arena.allocate)
            keep(matrices[plan].panels, matrices[plan].weight_format.name)
        vectors = {name: _pack_vector(vector, self.tensors) for name, vector in self.vectors.items()}
        for vector in vectors.values():
            keep(vector, "")
        return self._make_weights(matrices, vectors)

    def arrange(self, arrays: Sequence[Float32], formats: Sequence[str]) -> Weights:
        """Return the weights that `pack` returns, made of its arrays, which `keep` got; reads no tensors.

        Args:
            arrays: The arrays, flat.
            formats: Name of the weight format of each array.
        """
        matrices, remaining = dict[MatrixPlan, Matrix](), iter(zip(arrays, formats, strict=True))
        for plan, own in self._formats.items():
            array, name = next(remaining)
            used = own.fallback if own.fallback and own.name != name else own
            group_size = used.get_group_size(plan.n, self._get_group(plan))
            panels = array.reshape(plan.n_panels, *used.get_panel_shape(plan.n, group_size))
            matrices[plan] = Matrix(used, panels, plan.n, group_size)
        vectors = {
            name: array.reshape(vector.shape) for (name, vector), (array, _) in zip(self.vectors.items(), remaining, strict=True)
        }
        return self._make_weights(matrices, vectors)

    def _make_weights(self, matrices: Mapping[MatrixPlan, Matrix], vectors: dict[str, Float32]) -> Weights:
        """Return weights out of the packed matrices and vectors, and the table that stays in its file."""
        placed = {
            name: tuple(matrices[plan].place(*position) for plan, _, *position in shards) for name, shards in self.shards.items()
        }
        return Weights(placed, vectors, LazyTable(self.tensors[self.table]) if self.table else None)

    def check(self, weights: Weights) -> None:
        """Raise ValueError if a weight has another shape than the plan, is missing or is unknown."""
        found: dict[str, tuple[int, ...]] = {name: vector.shape for name, vector in weights.vectors.items()}
        for name, shards in weights.shards.items():
            found[name] = (sum(each.n_rows for each in shards), *{each.n for each in shards})
        for name, plan in self.plans.items():
            if found.get(name) != plan.shape:
                problem = f"has the shape {found[name]}" if name in found else "is missing"
                raise ValueError(f"{name} of the weights {problem}; the config needs the shape {plan.shape}")
        if extra := found.keys() - self.plans.keys():
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


def get_tensor(tensors: Tensors, name: str, layer: int | None) -> Any:
    """Return a tensor by its name, or the matrix of a layer or an expert in it."""
    return tensors[name] if layer is None else tensors[name][layer]


def _count_floats(n_panels: int, n: int, group: int, weight_format: WeightFormat) -> int:
    """Return the 4-byte words that a packed matrix takes in an `Arena`; group: as `get_group_size` takes it."""
    shape = weight_format.get_panel_shape(n, weight_format.get_group_size(n, group))
    return int(round_up(n_panels * math.prod(shape), LINE_WORDS))


def _count_fallback_floats(plan: MatrixPlan, weight_format: WeightFormat) -> int:
    """Return how many more 4-byte words a matrix takes in the fallback of a weight format than in the format itself, or 0."""
    formats = (weight_format.fallback or weight_format, weight_format)
    fallback, own = (_count_floats(plan.n_panels, plan.n, 0, each) for each in formats)
    return max(fallback - own, 0)


def _pack_vector(vector: VectorPlan, tensors: Tensors) -> Float32:
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
