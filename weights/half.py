"""bf16 and fp16 weights: two bytes each, strips (P, n, R) of them, widened in the tile; the arithmetic is fp32's, bit for bit."""

from dataclasses import replace

import numpy as np

from ..machine.tiles import STRIP_ROWS, float_tile
from ..machine.vectors import BF16_STORAGE, FP16_STORAGE, Float32, load_bf16, load_fp16
from .fp32 import floats_of_x, no_group, no_scratch, pack_rows, unpack_rows, weight_of
from .matrix import ALL, Floats, Kind, floats
from .multiplying import embedded_by, multiplied_by

bf16_product, bf16_experts = multiplied_by(__name__, "bf16_", *float_tile("bf16_tile", BF16_STORAGE), floats_of_x)
fp16_product, fp16_experts = multiplied_by(__name__, "fp16_", *float_tile("fp16_tile", FP16_STORAGE), floats_of_x)
bf16_embed = embedded_by(__name__, "bf16_", weight_of(load_bf16))
fp16_embed = embedded_by(__name__, "fp16_", weight_of(load_fp16))


def strip_shape(n: int, group: int) -> tuple[int, int]:
    """`Kind.strip_shape`: two weights to a word."""
    return n, STRIP_ROWS // 2


def fill_bf16(strips: Float32, first: int, stride: int, rows: Floats, group: int) -> None:
    """`Kind.fill`. Raises ValueError for rows of another type."""
    if rows.dtype != np.uint16:
        raise ValueError(f"{rows.dtype} does not become bf16 without a loss")
    pack_rows(strips.view(np.uint16), first, stride, rows)


def fill_fp16(strips: Float32, first: int, stride: int, rows: Floats, group: int) -> None:
    """`Kind.fill`. Raises ValueError for rows of another type."""
    if rows.dtype != np.float16:
        raise ValueError(f"{rows.dtype} does not become fp16 without a loss")
    pack_rows(strips.view(np.uint16), first, stride, rows.view(np.uint16))


def bf16_rows(strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`, widened."""
    return floats(unpack_rows(strips[block].view(np.uint16), n))


def fp16_rows(strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`, widened."""
    return floats(unpack_rows(strips[block].view(np.uint16), n).view(np.float16))


BF16 = Kind("bf16", bf16_product, bf16_embed, bf16_experts, no_group, strip_shape, fill_bf16, bf16_rows, no_scratch)
FP16 = replace(
    BF16, name="fp16", product=fp16_product, embed=fp16_embed, experts=fp16_experts, fill=fill_fp16, rows=fp16_rows,
)  # fmt: skip
