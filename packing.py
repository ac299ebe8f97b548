"""Tensors to the kernels' layout: fp32, or int8 in groups that share a scale. Knows nothing of files.

Symmetric int8 as llama2.c's export.py has it: scale = max |w| / 127 over a group of consecutive weights, w about value * scale.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .kernels import PANEL_ROWS, QUADS, Config, Float32, Weights, ceil_div, pack_matrix, round_up, zeros

Int8 = npt.NDArray[np.int8]
BLOCK_PANELS = 16  # packed at a time, so that what lies between two layouts stays in the cache


class Int8Matrix(NamedTuple):
    """values (rows, k); scales, one for each run of as many values, in memory order: a run may cross rows."""

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def group(self) -> int:
        """How many values share a scale."""
        return math.prod(self.shape) // int(self.scales.shape[0])


Tensors = Mapping[str, Any]  # by the names of `Config.shapes`; a matrix of int8 is an Int8Matrix, or a list of them by layer


def pack_weights(config: Config, tensors: Tensors, int8: bool = False) -> Weights:
    """The tensors in the kernels' layout; w1 and w3 take turns, panel by panel.

    tensors: by the names and in the shapes of `config.shapes()`, float32, or int8 as `Tensors` says; int8: quantize the matrices
    among float32 ones. Tensors may lie in a file: they are indexed by layer, then by a slice of rows, a block at a time.
    """
    t = tensors
    embedded = t["tok_emb"]
    file_group = embedded.group if isinstance(embedded, Int8Matrix) else 0
    dim_group, hidden_group = groups(config, file_group, int8)
    layers = range(config.n_layers)

    def stack(group: int, *names: str) -> Float32:
        """Panels (L, P, ...) of the named matrices of each layer, one below the other."""
        sizes = [_panels_of(config.shapes()[name][1]) for name in names]
        packed = _new_panels(config.shapes()[names[0]][2], group, config.n_layers, sum(sizes))
        for layer in layers:
            for name, end, size in zip(names, itertools.accumulate(sizes), sizes, strict=True):
                _pack(packed[layer], t[name][layer], group, end - size)
        return packed

    def table(name: str) -> Float32:
        """Panels (P, ...) of the embedding or the classifier."""
        packed = _new_panels(config.dim, dim_group, _panels_of(config.vocab_size))
        _pack(packed, t[name], dim_group)
        return packed

    gates = _new_panels(config.dim, dim_group, config.n_layers, 2 * _panels_of(config.hidden_dim))
    for layer in layers:
        for first, name in enumerate(("w1", "w3")):
            _pack(gates[layer], t[name][layer], dim_group, first, 2)
    embedding = table("tok_emb")
    return Weights(
        embedding=embedding,
        rms_att=_pad_rows(t["rms_att"]),
        wqkv=stack(dim_group, "wq", "wk", "wv"),
        wo=stack(dim_group, "wo"),
        rms_ffn=_pad_rows(t["rms_ffn"]),
        w13=gates,
        w2=stack(hidden_group, "w2"),
        rms_final=_pad_rows(t["rms_final"]),
        wcls=embedding if config.shared_classifier else table("wcls"),
        groups=np.array([dim_group, hidden_group]),
    )


def int8_copy(config: Config, weights: Weights) -> Weights:
    """Weights of `pack_weights` that are fp32, in int8: new matrices beside the same norms."""
    dim_group, hidden_group = groups(config, 0, int8=True)

    def copy(panels: Float32, group: int) -> Float32:
        *layers, n_panels, n, _ = panels.shape
        packed = _new_panels(n, group, *layers, n_panels)
        for source, target in zip(
            panels.reshape(-1, n_panels, n, PANEL_ROWS), packed.reshape(-1, *packed.shape[-3:]), strict=True
        ):
            for block in _blocks(n_panels):
                rows = source[block].transpose(0, 2, 1).reshape(-1, n)
                _pack_int8(target[block], *quantize_rows(rows, group))
        return packed

    embedding = copy(weights.embedding, dim_group)
    return weights._replace(
        embedding=embedding,
        wqkv=copy(weights.wqkv, dim_group),
        wo=copy(weights.wo, dim_group),
        w13=copy(weights.w13, dim_group),
        w2=copy(weights.w2, hidden_group),
        wcls=embedding if config.shared_classifier else copy(weights.wcls, dim_group),
        groups=np.array([dim_group, hidden_group]),
    )


def quantize_rows(rows: Float32, group: int) -> tuple[Int8, Float32]:
    """Values (n, groups, group) and scales (n, groups) of rows (n, k); zeros fill up a row's last group."""
    groups = np.zeros((rows.shape[0], round_up(rows.shape[1], group)), np.float32)
    groups[:, : rows.shape[1]] = rows
    groups = groups.reshape(rows.shape[0], -1, group)
    scales = np.maximum(groups.max(-1), np.float32(0) - groups.min(-1)) / np.float32(127)
    scales[scales < np.finfo(np.float32).tiny] = 0  # so few bits that a weight might be 190 of them, which wraps around
    groups /= np.where(scales > 0, scales, np.float32(1))[:, :, None]
    return np.rint(groups, out=groups).astype(np.int8), scales


def _own_group(n: int) -> int:
    """How many of a row's n weights share a scale where we quantize: 64, or 32 where 64 does not divide n."""
    return 64 if n % 64 == 0 else 32


def groups(config: Config, file_group: int, int8: bool) -> tuple[int, int]:
    """How many weights share a scale along dim and along hidden_dim, of a file's groups (0: fp32) or our own; 0 for fp32.

    A file's groups may cross the rows of w2; each is cut at the rows' ends, into groups of one scale.
    """
    if file_group:
        return math.gcd(file_group, config.dim), math.gcd(file_group, config.hidden_dim)
    return (_own_group(config.dim), _own_group(config.hidden_dim)) if int8 else (0, 0)


def weight_bytes(config: Config, file_group: int, int8: bool) -> float:
    """Bytes that a packed weight takes, at most."""
    return max(4 * (1 + ceil_div(group, QUADS)) / group if group else 4.0 for group in groups(config, file_group, int8))


def _panels_of(rows: int) -> int:
    return int(ceil_div(rows, PANEL_ROWS))


def _blocks(n_panels: int) -> Iterable[slice]:
    return (slice(first, min(first + BLOCK_PANELS, n_panels)) for first in range(0, n_panels, BLOCK_PANELS))


def _new_panels(n: int, group: int, *shape: int) -> Float32:
    """Room for panels of rows of n weights: see `Weights`."""
    if group == 0:
        return zeros(*shape, n, PANEL_ROWS)
    return zeros(*shape, ceil_div(n, group), (1 + ceil_div(group, QUADS)) * PANEL_ROWS)


def _pack(panels: Float32, matrix: Any, group: int, first: int = 0, step: int = 1) -> None:
    """Fill every step-th of panels (P, ...) from a matrix (rows, k); what pads rows and groups weighs nothing."""
    n_panels = _panels_of(matrix.shape[0])
    scales = matrix.scales[:] if isinstance(matrix, Int8Matrix) else None
    for block in _blocks(n_panels):
        rows = slice(block.start * PANEL_ROWS, min(block.stop * PANEL_ROWS, matrix.shape[0]))
        if group == 0:
            pack_matrix(panels, matrix[rows], first + step * block.start, step)
            continue
        quantized = quantize_rows(matrix[rows], group) if scales is None else _split(matrix, scales, rows, group)
        _pack_int8(panels[first::step][block], *quantized)


def _split(matrix: Int8Matrix, scales: Float32, rows: slice, group: int) -> tuple[Int8, Float32]:
    """Rows of a file's matrix as `quantize_rows` gives them, in groups that divide the file's."""
    n = matrix.shape[1]
    first_values = np.arange(rows.start, rows.stop)[:, None] * n + np.arange(0, n, group)
    return matrix.values[rows].reshape(len(first_values), -1, group), scales[first_values // matrix.group]


def _pack_int8(panels: Float32, values: Int8, scales: Float32) -> None:
    """Fill panels (P, groups, words) from values (rows, groups, group) and scales (rows, groups)."""
    n_rows, n_groups, group = values.shape
    padded_rows, n_quads = len(panels) * PANEL_ROWS, panels.shape[-1] // PANEL_ROWS - 1
    codes = np.full((padded_rows, n_groups, n_quads * QUADS), 128, np.uint8)
    np.bitwise_xor(values.view(np.uint8), 128, out=codes[:n_rows, :, :group])
    padded_scales = np.zeros((padded_rows, n_groups), np.float32)
    padded_scales[:n_rows] = scales
    words = panels.view(np.uint32).reshape(-1, n_groups, 1 + n_quads, PANEL_ROWS)
    words[:, :, 0] = padded_scales.view(np.uint32).reshape(-1, PANEL_ROWS, n_groups).transpose(0, 2, 1)
    words[:, :, 1:] = codes.view(np.uint32).reshape(-1, PANEL_ROWS, n_groups, n_quads).transpose(0, 2, 3, 1)


def _pad_rows(tensor: Any) -> Float32:
    """A tensor (..., D) with zeros up to whole panels."""
    rows: Float32 = tensor[:]
    padded_rows = zeros(*rows.shape[:-1], round_up(rows.shape[-1], PANEL_ROWS))
    padded_rows[..., : rows.shape[-1]] = rows
    return padded_rows
