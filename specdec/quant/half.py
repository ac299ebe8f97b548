"""bf16 and fp16 weights: two bytes each, strips (P, n, R) of them, widened in the tile; the arithmetic is fp32's, bit for bit."""

from functools import partial
from typing import Any

import numpy as np

from specdec.quant.fp32 import floats_of_x, no_group, no_scratch, pack_rows, unpack_rows, weight_of
from specdec.quant.matmul import embedded_by, multiplied_by
from specdec.quant.matrix import ALL, Floats, Kind, floats
from specdec.runtime.simd import BF16_STORAGE, FP16_STORAGE, Float32, Storage, load_bf16, load_fp16
from specdec.runtime.tile import STRIP_ROWS, float_tile

DTYPES = {"bf16": np.uint16, "fp16": np.float16}  # of rows


def strip_shape(n: int, group: int) -> tuple[int, int]:
    """`Kind.strip_shape`: two weights to a word."""
    return n, STRIP_ROWS // 2


def bits_as(name: str, rows: Floats) -> Floats:
    """The bits of rows of the kind of that name. Raises ValueError for rows of another type."""
    if rows.dtype != DTYPES[name]:
        raise ValueError(f"{rows.dtype} does not become {name} without a loss")
    return rows.view(np.uint16)


def fill(name: str, strips: Float32, first: int, stride: int, rows: Floats, group: int) -> None:
    """`Kind.fill`. Raises ValueError for rows of another type."""
    pack_rows(strips.view(np.uint16), first, stride, bits_as(name, rows))


def rows_of(name: str, strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`, widened."""
    return floats(unpack_rows(strips[block].view(np.uint16), n).view(DTYPES[name]))


def _kind(name: str, storage: Storage, load_halves: Any) -> Kind:
    product, experts = multiplied_by(__name__, f"{name}_", *float_tile(f"{name}_tile", storage), floats_of_x)
    embed = embedded_by(__name__, f"{name}_", weight_of(load_halves))
    filled, read = partial(fill, name), partial(rows_of, name)
    return Kind(name, product, embed, experts, no_group, strip_shape, filled, read, no_scratch)


BF16, FP16 = _kind("bf16", BF16_STORAGE, load_bf16), _kind("fp16", FP16_STORAGE, load_fp16)
