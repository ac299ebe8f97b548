"""bf16 and fp16 weights: two bytes each, strips (P, n, R) of them, widened in the tile; the arithmetic is fp32's, bit for bit."""

from dataclasses import replace

import numpy as np

from ..machine.programs import Floats2, Floats3, Ints1, Pass, operation
from ..machine.tiles import STRIP_ROWS, float_tile
from ..machine.vectors import BF16_STORAGE, FP16_STORAGE, Float32, load_bf16, load_fp16
from .fp32 import gather, multiply, multiply_mixture, no_group, no_scratch, pack_rows, unpack_rows
from .matrix import ALL, Floats, Kind, Mixture, Product, floats

bf16_tile = float_tile("bf16_tile", BF16_STORAGE)
fp16_tile = float_tile("fp16_tile", FP16_STORAGE)


@operation
def bf16_product(run: Pass, thread: int, p: Product) -> None:
    """`multiply` of bf16 weights."""
    multiply(bf16_tile, run, thread, p)


@operation
def bf16_experts(run: Pass, thread: int, p: Mixture) -> None:
    """`multiply_mixture` of bf16 weights."""
    multiply_mixture(bf16_tile, run, thread, p)


@operation
def bf16_embed(run: Pass, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group: int) -> None:
    """`gather` of bf16 weights."""
    gather(load_bf16, run, thread, out, w, tokens, n)


@operation
def fp16_product(run: Pass, thread: int, p: Product) -> None:
    """`multiply` of fp16 weights."""
    multiply(fp16_tile, run, thread, p)


@operation
def fp16_experts(run: Pass, thread: int, p: Mixture) -> None:
    """`multiply_mixture` of fp16 weights."""
    multiply_mixture(fp16_tile, run, thread, p)


@operation
def fp16_embed(run: Pass, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group: int) -> None:
    """`gather` of fp16 weights."""
    gather(load_fp16, run, thread, out, w, tokens, n)


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
