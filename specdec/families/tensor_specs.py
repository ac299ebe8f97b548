"""Specs of where the tensors of a model lie in its files, and how to convert them to the layout that our blocks take.

Shapes: D dim, F hidden dim, E experts.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specdec.model_config import ModelConfig

GATE_UP, QKV, QKV_BIASES = ("w1", "w3"), ("wq", "wk", "wv"), ("bq", "bk", "bv")  # may be stored in one tensor
EXPERT_WEIGHTS = ("experts_w1", "experts_w2", "experts_w3")
EXPERTS_GATE_UP, SHARED_GATE_UP = ("experts_w1", "experts_w3"), ("shared_w1", "shared_w3")
ROTARY_TENSORS = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")  # tensors of heads that RoPE rotates
CONV_IN, CONV_IN_BIASES = ("conv_b", "conv_c", "conv_x"), ("conv_b_bias", "conv_c_bias", "conv_x_bias")


class TensorSpec(NamedTuple):
    """A description of how a tensor is stored in a model's file.

    Attributes:
        name: The tensor's name in the file, with `{}` for the layer.
        is_neox_style: Whether each attention head has the first parts of all RoPE pairs, then all second parts; else pairs are
            adjacent.
        is_transposed: Whether the matrix is (inputs, outputs), not (outputs, inputs).
        fused_names: Our names of the tensors that are stored in one, concatenated along the outputs, including this one.
        is_unnumbered: Whether the tensor is the only one of a list, and its name has no number.
        head_interleave: (index, count) for attention heads interleaved with those of other tensors: this tensor's are each
            count-th one from `index` on.
        transform: How a small tensor is computed from the stored one.
        is_per_expert: Whether the tensor belongs to experts: each expert has its own if the name has a second `{}`, else all
            are stored in one tensor.
        row_stride: (first, step) of the outputs, for interleaved ones.
        scales_name: Name of the tensor with the exponents, for experts in blocks of MXFP4; of the one with the scale of a matrix
            that is packed with ternary weights if the files have it.
        make_row_groups: Function from the layer's config to the groups of rows that contain the tensor's own rows. With
            is_per_expert, a group belongs to an expert, and has its own rows only.
    """

    name: str
    is_neox_style: bool = False
    is_transposed: bool = False
    fused_names: tuple[str, ...] = ()
    is_unnumbered: bool = False
    head_interleave: tuple[int, int] = (0, 1)
    transform: "TensorTransform | None" = None
    is_per_expert: bool = False
    row_stride: tuple[int, int] = (0, 1)
    scales_name: str = ""
    make_row_groups: "Callable[[ModelConfig], RowGroups] | None" = None


class TensorTransform(NamedTuple):
    """A pair of functions: `apply` computes a tensor from the stored one, `get_stored_shape` the stored from the final shape."""

    apply: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
    get_stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple


class RowGroups(NamedTuple):
    """A selection of rows from a fused tensor with n equal groups of rows, each split into parts.

    Attributes:
        n: Number of groups.
        part_sizes: Number of rows of each part of a group.
        first_part: Index of the first selected part of each group.
        last_part: Index after the last selected part.
    """

    n: int
    part_sizes: tuple[int, ...]
    first_part: int
    last_part: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The first selected row in a group, and the row after the last."""
        return sum(self.part_sizes[: self.first_part]), sum(self.part_sizes[: self.last_part])

    @property
    def n_rows(self) -> int:
        """The total number of rows of the fused tensor: all parts of all groups."""
        return self.n * sum(self.part_sizes)

    def get_row_indices(self) -> npt.NDArray[np.int64]:
        """Return the indices of the selected rows: the rows of the first selected part in all groups, then of the next part."""
        groups, ends = np.arange(self.n_rows).reshape(self.n, -1), [*itertools.accumulate(self.part_sizes, initial=0)]
        return np.concatenate([groups[:, ends[i] : ends[i + 1]].reshape(-1) for i in range(self.first_part, self.last_part)])


def make(template: str, **stored_names: str) -> dict[str, TensorSpec]:
    """Return tensor specs by our names.

    Args:
        template: The stored name with `%s` for the part that differs, such as `layers.{}.%s.weight`.
        stored_names: That part for each of our names.
    """
    return {name: TensorSpec(template % stored_name) for name, stored_name in stored_names.items()}


def make_per_expert(template: str, **stored_names: str) -> dict[str, TensorSpec]:
    """Return tensor specs of experts by our names; see `make` and `TensorSpec`."""
    return replace(make(template, **stored_names), stored_names, is_per_expert=True)


def fuse(
    names: tuple[str, ...], stored_name: str, is_per_expert: bool = False, is_transposed: bool = False
) -> dict[str, TensorSpec]:
    """Return tensor specs by our names for tensors that a file stores concatenated in one tensor.

    Args:
        names: Our names of the tensors, in the order in which they are concatenated.
        stored_name: The name of the tensor in the file.
        is_per_expert: See `TensorSpec`.
        is_transposed: See `TensorSpec`.
    """
    return dict.fromkeys(
        names, TensorSpec(stored_name, fused_names=names, is_per_expert=is_per_expert, is_transposed=is_transposed)
    )


def fuse_experts(template: str) -> dict[str, TensorSpec]:
    """Return the specs of expert weights in a folder that stores all experts in one tensor, as transformers 5 does in memory."""
    return {
        **fuse(EXPERTS_GATE_UP, template % "gate_up_proj", is_per_expert=True),
        "experts_w2": TensorSpec(template % "down_proj", is_per_expert=True),
    }


def replace(specs: Mapping[str, TensorSpec], names: Collection[str], **changes: Any) -> dict[str, TensorSpec]:
    """Return a copy of tensor specs in which those with the given names have some fields changed."""
    return {name: spec._replace(**changes) if name in names else spec for name, spec in specs.items()}


def set_rope_pairs(specs: Mapping[str, TensorSpec], is_neox_style: bool = True) -> dict[str, TensorSpec]:
    """Return a copy of tensor specs in which the tensors that RoPE rotates have pairs in one style; see `TensorSpec`."""
    return replace(specs, ROTARY_TENSORS, is_neox_style=is_neox_style)


# Convolution weights, stored with a row per channel; folders have another dimension of 1.
CONV_TAPS = TensorTransform(
    lambda stored: np.ascontiguousarray(stored.reshape(len(stored), -1).T), lambda shape: (shape[1], 1, shape[0])
)
TRANSPOSED_CONV_TAPS = CONV_TAPS._replace(get_stored_shape=lambda shape: shape[::-1])
# Biases (E, F), stored interleaved with others as (E, 2 F).
EVEN_COLUMNS = TensorTransform(lambda stored: stored[:, 0::2], lambda shape: (shape[0], 2 * shape[1]))
ODD_COLUMNS = EVEN_COLUMNS._replace(apply=lambda stored: stored[:, 1::2])
ONE_PLUS = TensorTransform(lambda stored: np.float32(1) + stored)  # norms that multiply by 1 + w


TensorSpecs = Mapping[str, TensorSpec]


class TensorSource(Protocol):
    """The protocol of a model's files as a collection of tensors by name."""

    def __contains__(self, name: str, /) -> bool:
        """Return whether there is a tensor with this name."""

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of the tensors."""

    def get_shape(self, name: str, /) -> tuple[int, ...]:
        """Return the shape of the tensor with this name; raise CheckpointError if it is missing."""

    def get_tensor(self, name: str, shape: tuple[int, ...], /) -> Any:
        """Return the tensor with this name; raise CheckpointError if it is missing or has another shape."""


def select_tensor_specs(
    specs: TensorSpecs, alternatives: Sequence[TensorSpecs], source: TensorSource, n_layers: int
) -> dict[str, TensorSpec]:
    """Return the tensor specs that fit a model's files, by our names.

    Args:
        specs: The family's main specs.
        alternatives: Groups of specs; each group replaces the specs of the same names if its first tensor is in the files.
        source: The tensors of the files.
        n_layers: Number of layers in the files.
    """
    found = dict(specs)
    for others in alternatives:
        first = next(iter(others.values())).name
        if any(first.format(i, 0) in source for i in range(n_layers)):
            found |= others
    return found
