"""Blocks of 4 to 8 bits as GGUF files have them: rows of them, and the numbers that they stand for.

Layouts and formulas are ggml's (ggml-common.h, ggml-quants.c): f16 scales d (and minima m, dmin), codes q of a few bits. The
floats are those of the python package gguf, bit for bit: each product and sum is rounded to float32, in the order written here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import FP16, Bytes, FileTensor
from specdec.quant.gguf_blocks import powers
from specdec.quant.grouped import NUMBERS
from specdec.runtime.simd import Int64

Float32 = npt.NDArray[np.float32]
GROUPS = 8  # of 32 weights in a block of 256 of Q4_K and Q5_K


class Block(NamedTuple):
    """A type of blocks: weights and bytes of each, at which bytes its f16 scales lie, (n, bytes) to (n, weights), and whether
    blocks (n, bytes) have scales that are done here."""

    n_weights: int
    n_bytes: int
    scales: tuple[int, ...]
    floats: Callable[[Bytes], Float32]
    are_done: Callable[[Bytes], bool] = lambda blocks: True


def _scale(blocks: Bytes, at: int) -> Float32:
    """(n, 1): an f16 of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(FP16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """(..., 2 n) of (..., n): the low halves, then the high ones."""
    return np.concatenate([data & 15, data >> 4], -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """(n, 32): a u32 of each block, bit by bit, in the place of fifth ones."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)
    return bits


def _q8_0(blocks: Bytes) -> Float32:
    """d q."""
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: Bytes) -> Float32:
    """d (q - 8)."""
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(blocks: Bytes) -> Float32:
    """d q + m."""
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]) + _scale(blocks, 2)


def _q5_0(blocks: Bytes) -> Float32:
    """d (q - 16)."""
    return _scale(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16))


def _q5_1(blocks: Bytes) -> Float32:
    """d q + m."""
    return _scale(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _scale(blocks, 2)


def _sub_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """d sc and dmin m (n, 8, 1) of Q4_K and Q5_K, whose 6-bit sc and m lie in 12 bytes: those of groups 4 to 7 in two pieces."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], 1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], 1)
    return (_scale(blocks, 0) * scales)[..., None], (_scale(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Bytes) -> Float32:
    """d sc q - dmin m."""
    scales, minima = _sub_scales(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, GROUPS // 2, 32)).reshape(-1, GROUPS, 32)
    return (scales * codes - minima).reshape(len(blocks), -1)


def _q5_k(blocks: Bytes) -> Float32:
    """d sc q - dmin m; bit j of the 32 bytes in front belongs to group j."""
    scales, minima = _sub_scales(blocks)
    codes = _nibbles(blocks[:, 48:].reshape(-1, GROUPS // 2, 32)).reshape(-1, GROUPS, 32)
    codes |= ((blocks[:, None, 16:48] >> np.arange(GROUPS, dtype=np.uint8)[:, None]) & 1) << 4
    return (scales * codes - minima).reshape(len(blocks), -1)


def _q6_k(blocks: Bytes) -> Float32:
    """d sc (q - 32): of each 128 weights 64 bytes of nibbles and 32 of upper bits, two to a weight; sc int8 for each 16."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    codes = (low | (high << 4)).view(np.int8).reshape(-1, 16, 16) - np.int8(32)
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scales[..., None] * codes).reshape(len(blocks), -1)


_TABLES: dict[str, Float32] = {name: np.array(numbers, np.float32) for name, numbers in NUMBERS.items()}


def _mxfp4(blocks: Bytes) -> Float32:
    """2^(e - 128) t[q]: the OCP's MX format of 2023, t the doubles of E2M1."""
    floats: Float32 = powers(blocks[:, :1]) * _TABLES["e2m1"][_nibbles(blocks[:, 1:])]
    return floats


def _iq4_nl(blocks: Bytes) -> Float32:
    """d t[q]."""
    return _scale(blocks, 0) * _TABLES["nl"].take(_nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: Bytes) -> Float32:
    """d (sc - 32) t[q]: of the 6 bits of sc the upper 2 in a u16, the lower 4 in 4 bytes."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = blocks[:, 4:8].repeat(2, 1) >> np.array([0, 4] * 4, np.uint8) & 15
    scales = _scale(blocks, 0) * ((lower | upper << 4).astype(np.int8) - np.int8(32))
    codes = _nibbles(blocks[:, 8:].reshape(-1, GROUPS, 16))
    return (scales[..., None] * _TABLES["nl"].take(codes)).reshape(len(blocks), -1)


def _pairs(blocks: Bytes) -> Bytes:
    """(n, 16, 16): the codes of 2 bits in 64 bytes (n, 64), four to a byte, of which 32 bytes have 128 in their order."""
    pairs: Bytes = (blocks.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(-1, 16, 16)
    return pairs


def _q2_k(blocks: Bytes) -> Float32:
    """d sc q - dmin m: of 16 bytes each has a scale and a minimum."""
    scales, minima = _scale(blocks, 80) * (blocks[:, :16] & np.uint8(15)), _scale(blocks, 82) * (blocks[:, :16] >> np.uint8(4))
    floats = scales[..., None] * _pairs(blocks[:, 16:80]) - minima[..., None]
    return np.ascontiguousarray(floats.reshape(len(blocks), -1), np.float32)


def _q3_k(blocks: Bytes) -> Float32:
    """d (sc - 32) (q - 4): sc of 6 bits in 12 bytes, the third bit of q in the first 32 bytes, bit j of those of each 32."""
    lower = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], 1)
    upper = np.concatenate([blocks[:, 104:108] >> np.uint8(by) & 3 for by in (0, 2, 4, 6)], 1)
    scales = _scale(blocks, 108) * ((lower | upper << 4).view(np.int8) - np.int8(32))
    thirds = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    codes = (_pairs(blocks[:, 32:96]) | thirds << 2).view(np.int8) - np.int8(4)
    floats: Float32 = (scales[..., None] * codes).reshape(len(blocks), -1)
    return floats


def _fit_fp16(blocks: Bytes) -> bool:
    """Whether all exponents of MXFP4 are those of fp16, or of zeros."""
    fits = (blocks[:, 0] >= LEAST_EXPONENT) & (blocks[:, 0] <= MOST_EXPONENT)
    return bool(fits.all()) or not (blocks[~fits, 1:] & 0x77).any()


LEAST_EXPONENT, MOST_EXPONENT = 128 - 24, 128 + 15
BLOCKS = {
    "Q8_0": Block(32, 34, (0,), _q8_0),
    "Q4_0": Block(32, 18, (0,), _q4_0),
    "Q4_1": Block(32, 20, (0, 2), _q4_1),
    "Q5_0": Block(32, 22, (0,), _q5_0),
    "Q5_1": Block(32, 24, (0, 2), _q5_1),
    "Q4_K": Block(256, 144, (0, 2), _q4_k),
    "Q5_K": Block(256, 176, (0, 2), _q5_k),
    "Q6_K": Block(256, 210, (208,), _q6_k),
    "Q2_K": Block(256, 84, (80, 82), _q2_k),
    "Q3_K": Block(256, 110, (108,), _q3_k),
    "IQ4_NL": Block(32, 18, (0,), _iq4_nl),
    "IQ4_XS": Block(256, 136, (0,), _iq4_xs),
    "MXFP4": Block(32, 17, (), _mxfp4, _fit_fp16),
}


def dequantized(kind: str, rows: Bytes) -> Float32:
    """Rows (rows, bytes) of blocks of that type as the numbers (rows, n) that they stand for."""
    block = BLOCKS[kind]
    return block.floats(rows.reshape(-1, block.n_bytes)).reshape(len(rows), -1)


@dataclass(frozen=True)
class BlockTensor:
    """A matrix whose rows are blocks.

    stored: its bytes (rows, bytes), to be sliced by rows; type: in `BLOCKS`; damaged: its file and name, for people.
    What is asked for is read then. Raises CheckpointError for scales that are not finite.
    """

    stored: Any
    type: str
    damaged: str

    @property
    def shape(self) -> tuple[int, ...]:
        rows, n_bytes = self.stored.shape
        return rows, n_bytes // BLOCKS[self.type].n_bytes * BLOCKS[self.type].n_weights

    def __getitem__(self, index: slice) -> Float32:
        first, last, _ = index.indices(self.shape[0])
        return dequantized(self.type, self.blocks(first, last))

    def blocks(self, first: int, last: int) -> Bytes:
        """(last - first, bytes): those rows as they lie in the file."""
        data: Bytes = self.stored[first:last]
        block = BLOCKS[self.type]
        for at in block.scales:
            upper = data.reshape(-1, block.n_bytes)[:, at + 1]
            if ((upper & 0x7C) == 0x7C).any():  # the exponent's bits, all of them
                raise CheckpointError(f"{self.damaged} holds NaN or infinite scales")
        if not block.are_done(data.reshape(-1, block.n_bytes)):
            raise CheckpointError(f"{self.damaged} holds scales below 2^-24 or above 2^15, which are not supported")
        return data

    def flat(self) -> "BlockTensor":
        """As `FileTensor.flat`: its rows are there one below the other already."""
        return self

    def part(self, first: int, last: int) -> "BlockTensor":
        """Those rows, which are not read yet."""
        assert isinstance(self.stored, FileTensor)
        return replace(self, stored=self.stored.part(first, last))

    def picked(self, places: Int64) -> "BlockTensor":
        """Those of its rows, in that order."""
        assert isinstance(self.stored, FileTensor)
        return replace(self, stored=self.stored.picked(places))

    def heads(self, head_dim: int, n_turned: int, turn: tuple[int, int] = (0, 1)) -> "BlockTensor":
        """The same whose rows are in our order, or a part of them: see `FileTensor.heads`."""
        assert isinstance(self.stored, FileTensor)
        return replace(self, stored=self.stored.heads(head_dim, n_turned, turn))
