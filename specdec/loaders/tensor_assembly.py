"""Index the tensors in a model's files, and convert them to the layout of the model's architecture."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from specdec.argument_checks import CheckpointError, JSONDict, format_json_value
from specdec.families.tensor_specs import TensorSource, TensorSpec
from specdec.loaders.checkpoint import FLOATS, FP32, INTEGERS, DerivedTensor, Dtype, FileTensor, TensorFile
from specdec.model import get_architecture
from specdec.model_config import ModelConfig
from specdec.quant.packed_matrix import to_float32
from specdec.runtime.simd import Array, Int64

# Inputs that are transposed at once: a cache line of each output. Measured for 3 GB in fp32: 2.7 GB/s, all at once 0.7 GB/s.
TRANSPOSE_CHUNK_COLUMNS = 16
COMPARE_CHUNK_ROWS = 2048  # rows of the embedding and the classifier that are compared at once
File = TypeVar("File", bound=TensorFile)


class TensorIndex(Generic[File]):
    """An index of the tensors in a model's files by name, which records the tensors that are used; base class.

    Attributes:
        need_phrase: Part of error messages that says what needs a tensor, such as "its config.json needs".
        shape_phrase: Part of error messages that says what gives a shape, such as "config.json says".
        model_phrase: Part of error messages that says what describes the model, such as "config.json describes".
    """

    need_phrase = shape_phrase = model_phrase = ""

    def __init__(self, path: Path) -> None:
        """Create an index without tensors."""
        self.path = path
        self._sources: dict[str, tuple[File, str]] = {}  # the file, and the name in it
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Return whether the files have a tensor with this name."""
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of the tensors."""
        return iter(self._sources)

    def ignore(self, names: Iterable[str]) -> None:
        """Mark the tensors with the given names as used, because the model does not need them; unknown names do no harm."""
        self._used.update(names)

    def check_all_used(self) -> None:
        """Raise CheckpointError if a tensor in the files was neither used nor ignored."""
        for name in self._sources:
            if name not in self._used:
                raise CheckpointError(f"{self.describe(name)} is not part of the model that {self.model_phrase}")

    def describe(self, name: str) -> str:
        """Return the path of a tensor's file and the tensor's name in that file as a string, for error messages."""
        file, full = self._sources[name]
        return f"{file.path}: {format_json_value(full)}"

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor with a name.

        Raises:
            CheckpointError: No file has the tensor.
        """
        if name not in self._sources:
            raise CheckpointError(f"{self.path} has no tensor {name}, which {self.need_phrase}")
        file, full = self._sources[name]
        return file.entries[full].shape

    def get_tensor(self, name: str, shape: tuple[int, ...], types: Mapping[str, Dtype] = FLOATS) -> Any:
        """Return the tensor with a name for reading later, after checking its shape and type, and mark the tensor as used.

        Args:
            name: Name of the tensor.
            shape: The expected shape.
            types: Accepted types, as in `TensorFile.get_tensor`.

        Raises:
            CheckpointError: The tensor is missing or has another shape or type.
        """
        found = self.get_shape(name)
        if found != shape:
            raise CheckpointError(f"{self.describe(name)} has the shape {found}; {self.shape_phrase} {shape}")
        self._used.add(name)
        file, full = self._sources[name]
        return file.get_tensor(full, types)

    def read_integers(self, name: str, n: int) -> Int64:
        """Read the vector of n integers with a name, (n,), and mark it as used.

        Raises:
            CheckpointError: As in `get_tensor`.
        """
        integers: Int64 = self.get_tensor(name, (n,), INTEGERS)[:]
        return integers


def assemble_tensors(config: ModelConfig, specs: Mapping[str, TensorSpec], source: TensorSource) -> JSONDict:
    """Find a model's tensors in its files, and return them in the layout of the model's architecture, by its tensor names.

    Checks names, shapes and types; weights are read later. Some values are lists, of one tensor per layer or per expert.

    Args:
        config: The model's config.
        specs: Where each tensor is stored, by the architecture's names.
        source: The tensors of the files.

    Raises:
        CheckpointError: A tensor is missing or has another shape or type.
    """
    return TensorAssembler(config, specs, source).assemble()


class TensorAssembler:
    """The state of `assemble_tensors`: its arguments, and the shapes of the architecture's tensors."""

    def __init__(self, config: ModelConfig, specs: Mapping[str, TensorSpec], source: TensorSource) -> None:
        """Store the arguments and compute the shapes of the architecture's tensors."""
        self.config, self.specs, self.source = config, specs, source
        if config.head:
            from specdec import heads  # noqa: F401, makes the architectures of heads known
        self.shapes = get_architecture(config).shapes(config)

    def assemble(self) -> JSONDict:
        """Return all tensors by the architecture's names; for the errors see `assemble_tensors`."""
        tensors: dict[str, object] = {}
        for name, shape in self.shapes.items():
            layer, _, short_name = name.rpartition(".")  # "layer.name" for tensors that only some layers have
            spec = self.specs[short_name]
            if spec.is_per_expert:
                tensors[name] = self.get_experts(name, layer, shape, spec)
            elif layer:
                tensors[name] = self.get_tensor(name, spec.name.format(layer), shape, spec, int(layer))
            elif "{}" in spec.name or spec.is_unnumbered:
                tensors[name] = [self.get_tensor(name, spec.name.format(i), shape[1:], spec, i) for i in range(shape[0])]
            else:
                tensors[name] = self.get_tensor(name, spec.name, shape, spec)
        return tensors

    def get_tensor(self, name: str, stored_name: str, shape: tuple[int, ...], spec: TensorSpec, layer: int = 0) -> Any:
        """Return a tensor in the architecture's layout, cut out of, reordered or computed from a stored tensor; read it later.

        Args:
            name: Name of the tensor in the architecture, with the layer's number if only some layers have it.
            stored_name: Name of the tensor in the files that holds it, alone or with others.
            shape: Shape of the result, for one layer or expert.
            spec: How the tensor is stored.
            layer: Index of the layer, for settings that differ between layers.

        Raises:
            CheckpointError: The stored tensor is missing or has another shape or type.
        """
        n_rows, *others = shape
        if spec.make_row_groups:
            groups = spec.make_row_groups(self.config.layer_config(layer))
            return self.source.get_tensor(stored_name, (groups.n_rows, *others)).select_rows(groups.get_row_indices())
        fused = [name.removesuffix(name.rpartition(".")[2]) + each for each in spec.fused_names] or [name]
        rows = [self.shapes[each][-len(shape)] for each in fused]
        total, first = sum(rows), sum(rows[: fused.index(name)])
        if spec.is_transposed:
            return transpose(self.source.get_tensor(stored_name, (*others, total)), n_rows, first)
        whole_shape = (total * spec.head_interleave[1], *others)
        if (scale_name := spec.scales_name.format(layer)) and scale_name in self.source:
            reader = import_module("specdec.loaders.gguf_blocks")
            stored = reader.get_ternary_matrix(self.source, (stored_name, scale_name), whole_shape)
        else:
            stored = self.source.get_tensor(
                stored_name, spec.transform.get_stored_shape(whole_shape) if spec.transform else whole_shape
            )
        view = stored.slice_rows(first, first + n_rows) if spec.fused_names else stored
        if spec.is_neox_style or spec.head_interleave[1] > 1:
            heads = self.config.layer_config(layer)
            rotary_dim = heads.rotary_dim if spec.is_neox_style else 0
            view = view.select_rows(order_head_rows(view.shape[0], heads.head_dim, rotary_dim, *spec.head_interleave))
        if not (transform := spec.transform):
            return view
        # Only small tensors have a transform, so all of it is computed for each slice.
        return DerivedTensor(
            view, shape, FP32, lambda first, last: transform.apply(to_float32(view[:])).reshape(shape)[first:last]
        )

    def get_experts(self, name: str, layer: str, shape: tuple[int, ...], spec: TensorSpec) -> list[Any]:
        """Return the list of one matrix per expert for a tensor of a layer; a stored tensor of all experts is cut into slices.

        Args:
            name: Name of the tensor in the architecture, with the layer's number.
            layer: The layer's number.
            shape: Number of experts, and rows and columns of each matrix.
            spec: How the tensor is stored.

        Raises:
            CheckpointError: A stored tensor is missing or has another shape or type.
        """
        n, n_rows, n_columns = shape
        before, experts, after = spec.name.partition("experts.{}")
        stored_name = before.format(layer) + experts + after  # with "{}" for the expert if each has its own tensor
        if spec.scales_name:
            reader = import_module("specdec.loaders.gguf_blocks")
            names = (stored_name, spec.scales_name.format(layer))
            return list(reader.get_mxfp4_experts(self.source, names, shape, *spec.row_stride))
        if spec.make_row_groups:
            groups = spec.make_row_groups(self.config.layer_config(int(layer)))
            (first, last), size = groups.bounds, sum(groups.part_sizes)
            whole = self.source.get_tensor(stored_name, (groups.n_rows, n_rows if spec.is_transposed else n_columns))
            parts = [whole.slice_rows(i * size + first, i * size + last) for i in range(n)]
            return [transpose_rows(part) for part in parts] if spec.is_transposed else parts
        if experts:
            return [self.get_tensor(name, stored_name.format(i), shape[1:], spec) for i in range(n)]
        fused = [f"{layer}.{each}" for each in spec.fused_names] or [name]
        sizes = [self.shapes[each][1] for each in fused]
        total, first = sum(sizes), sum(sizes[: fused.index(name)])
        if spec.is_transposed:
            column, step = spec.row_stride
            whole = self.source.get_tensor(stored_name, (n, n_columns, total * step)).flatten_matrices()
            matrices = [whole.slice_rows(i * n_columns, (i + 1) * n_columns) for i in range(n)]
            return [transpose(matrix, n_rows, first + column, step) for matrix in matrices]
        whole = self.source.get_tensor(stored_name, (n, total, n_columns)).flatten_matrices()
        return [whole.slice_rows(i * total + first, i * total + first + n_rows) for i in range(n)]


def order_head_rows(n_rows: int, head_dim: int, rotary_dim: int, index: int, n_interleaved: int) -> Int64:
    """Return the indices of a stored tensor's rows in the order of our RoPE, which rotates pairs of adjacent rows.

    Of the first rotary_dim rows of a head, i and i + rotary_dim / 2 become 2i and 2i + 1.

    Args:
        n_rows: Rows of the stored tensor.
        head_dim: Rows of a head.
        rotary_dim: Rows of a head that RoPE rotates; 0 keeps the order.
        index: Index of the first head of this tensor among heads that are interleaved with others.
        n_interleaved: Distance from one head of this tensor to the next.
    """
    order = np.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].reshape(2, -1).T.reshape(-1)
    heads = np.arange(n_rows).reshape(-1, n_interleaved, head_dim)[:, index]
    return heads[:, order].reshape(-1)


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two tensors of the same shape have the same dtype and numbers, after reading both in chunks of rows."""
    starts = range(0, a.shape[0], COMPARE_CHUNK_ROWS)
    return a.dtype == b.dtype and all(
        np.array_equal(a[first : first + COMPARE_CHUNK_ROWS], b[first : first + COMPARE_CHUNK_ROWS]) for first in starts
    )


def transpose_rows(stored: Any) -> DerivedTensor:
    """Return the transpose of a small matrix, in float32 if the matrix has blocks; each read reads the whole matrix."""
    return DerivedTensor(
        stored,
        stored.shape[::-1],
        getattr(stored, "dtype", FP32),
        lambda first, last: np.ascontiguousarray(stored[:].T[first:last]),
    )


def transpose(stored: FileTensor, n_rows: int, first: int, step: int = 1) -> DerivedTensor:
    """Return the transpose of a stored matrix, or of some of its columns, as a tensor that is computed when it is read.

    Args:
        stored: The stored matrix (inputs, outputs).
        n_rows: Number of stored columns to take, which are the rows of the result.
        first: The first stored column to take.
        step: Distance between the stored columns to take.
    """

    def read_rows(begin: int, end: int) -> Array:
        n, at = max(end - begin, 0), first + begin * step
        columns = stored.read_columns(at, at + n * step - (step - 1) * (n > 0))[:, ::step]
        read_rows = np.empty(columns.shape[::-1], columns.dtype)
        for i in range(0, len(columns), TRANSPOSE_CHUNK_COLUMNS):
            read_rows[:, i : i + TRANSPOSE_CHUNK_COLUMNS] = columns[i : i + TRANSPOSE_CHUNK_COLUMNS].T
        return read_rows

    return DerivedTensor(stored, (n_rows, stored.shape[0]), stored.dtype, read_rows)
