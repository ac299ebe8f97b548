"""Quantized blocks of 2 to 8 bits in GGUF files, and their dequantization.

Layouts and formulas are ggml's (ggml-common.h, ggml-quants.c): f16 scales d (and minima m, dmin), codes q of a few bits. The
floats equal those of the python package gguf bit by bit: each product and sum is rounded to float32, in the order written here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import BYTE, FP16, DerivedTensor, FileTensor
from specdec.loaders.model_file import Bytes
from specdec.quant.gguf_repacking import e8m0_to_fp32_half
from specdec.quant.groupwise import CODEBOOKS
from specdec.runtime.simd import Int64

Float32 = npt.NDArray[np.float32]
GROUPS_PER_BLOCK = 8  # groups of 32 weights in a block of 256 of Q4_K and Q5_K


class BlockFormat(NamedTuple):
    """A format of quantized blocks in GGUF files, such as Q8_0: its sizes, and functions that dequantize and check blocks.

    Attributes:
        n_weights: Number of weights in a block.
        n_bytes: Number of bytes in a block.
        scale_offsets: Bytes of a block at which its f16 scales begin.
        dequantize: Function from blocks (n, bytes) to floats (n, weights).
        is_supported: Function that returns whether the scales of blocks (n, bytes) are supported.
    """

    n_weights: int
    n_bytes: int
    scale_offsets: tuple[int, ...]
    dequantize: Callable[[Bytes], Float32]
    is_supported: Callable[[Bytes], bool] = lambda blocks: True


def _read_scales(blocks: Bytes, at: int) -> Float32:
    """Return the f16 at byte `at` of each block (n, bytes) as float32, (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(FP16).astype(np.float32)


def _unpack_nibbles(data: Bytes) -> Bytes:
    """Unpack bytes (..., n) of two 4-bit codes each to one code per byte, (..., 2 n): all lower halves, then all upper ones."""
    return np.concatenate([data & 15, data >> 4], -1)


def _unpack_fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Unpack the u32 at byte `at` of each block to the fifth bits of 32 codes, (n, 32): 16 for each set bit, else 0."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)
    return bits


def _dequantize_q8_0(blocks: Bytes) -> Float32:
    """Dequantize Q8_0 blocks (n, 34) to weights (n, 32): d q."""
    return _read_scales(blocks, 0) * blocks[:, 2:].view(np.int8)


def _dequantize_q4_0(blocks: Bytes) -> Float32:
    """Dequantize Q4_0 blocks (n, 18) to weights (n, 32): d (q - 8)."""
    return _read_scales(blocks, 0) * (_unpack_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _dequantize_q4_1(blocks: Bytes) -> Float32:
    """Dequantize Q4_1 blocks (n, 20) to weights (n, 32): d q + m."""
    return _read_scales(blocks, 0) * _unpack_nibbles(blocks[:, 4:]) + _read_scales(blocks, 2)


def _dequantize_q5_0(blocks: Bytes) -> Float32:
    """Dequantize Q5_0 blocks (n, 22) to weights (n, 32): d (q - 16)."""
    return _read_scales(blocks, 0) * (
        (_unpack_nibbles(blocks[:, 6:]) | _unpack_fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    )


def _dequantize_q5_1(blocks: Bytes) -> Float32:
    """Dequantize Q5_1 blocks (n, 24) to weights (n, 32): d q + m."""
    return _read_scales(blocks, 0) * (_unpack_nibbles(blocks[:, 8:]) | _unpack_fifth_bits(blocks, 4)) + _read_scales(blocks, 2)


def _unpack_sub_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Return the scales d sc and the minima dmin m of the 8 groups of each Q4_K or Q5_K block, both (n, 8, 1).

    The 6-bit sc and m are packed into 12 bytes; the sc and m of groups 4 to 7 are split in two.
    """
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], 1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], 1)
    return (_read_scales(blocks, 0) * scales)[..., None], (_read_scales(blocks, 2) * minima)[..., None]


def _dequantize_q4_k(blocks: Bytes) -> Float32:
    """Dequantize Q4_K blocks (n, 144) to weights (n, 256): d sc q - dmin m."""
    scales, minima = _unpack_sub_scales(blocks)
    codes = _unpack_nibbles(blocks[:, 16:].reshape(-1, GROUPS_PER_BLOCK // 2, 32)).reshape(-1, GROUPS_PER_BLOCK, 32)
    return (scales * codes - minima).reshape(len(blocks), -1)


def _dequantize_q5_k(blocks: Bytes) -> Float32:
    """Dequantize Q5_K blocks (n, 176) to weights (n, 256): d sc q - dmin m.

    Bit j of the 32 bytes of fifth bits belongs to group j.
    """
    scales, minima = _unpack_sub_scales(blocks)
    codes = _unpack_nibbles(blocks[:, 48:].reshape(-1, GROUPS_PER_BLOCK // 2, 32)).reshape(-1, GROUPS_PER_BLOCK, 32)
    codes |= ((blocks[:, None, 16:48] >> np.arange(GROUPS_PER_BLOCK, dtype=np.uint8)[:, None]) & 1) << 4
    return (scales * codes - minima).reshape(len(blocks), -1)


def _dequantize_q6_k(blocks: Bytes) -> Float32:
    """Dequantize Q6_K blocks (n, 210) to weights (n, 256): d sc (q - 32).

    Each 128 weights have 64 bytes of nibbles and 32 bytes of upper bits, two bits per weight; each 16 weights have an int8 sc.
    """
    low = _unpack_nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    codes = (low | (high << 4)).view(np.int8).reshape(-1, 16, 16) - np.int8(32)
    scales = _read_scales(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scales[..., None] * codes).reshape(len(blocks), -1)


_TABLES: dict[str, Float32] = {name: np.array(numbers, np.float32) for name, numbers in CODEBOOKS.items()}


def _dequantize_mxfp4(blocks: Bytes) -> Float32:
    """Dequantize MXFP4 blocks (n, 17) to weights (n, 32): 2^(e - 128) t[q].

    t has the doubled values of E2M1 (OCP's MX format of 2023).
    """
    floats: Float32 = e8m0_to_fp32_half(blocks[:, :1]) * _TABLES["e2m1"][_unpack_nibbles(blocks[:, 1:])]
    return floats


def _dequantize_iq4_nl(blocks: Bytes) -> Float32:
    """Dequantize IQ4_NL blocks (n, 18) to weights (n, 32): d t[q], with the table t of ggml's kvalues_iq4nl."""
    return _read_scales(blocks, 0) * _TABLES["nl"].take(_unpack_nibbles(blocks[:, 2:]))


def _dequantize_iq4_xs(blocks: Bytes) -> Float32:
    """Dequantize IQ4_XS blocks (n, 136) to weights (n, 256): d (sc - 32) t[q], with the table t of IQ4_NL.

    Each of the 8 sc has 6 bits: the upper 2 are in a u16, the lower 4 in 4 bytes.
    """
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = blocks[:, 4:8].repeat(2, 1) >> np.array([0, 4] * 4, np.uint8) & 15
    scales = _read_scales(blocks, 0) * ((lower | upper << 4).astype(np.int8) - np.int8(32))
    codes = _unpack_nibbles(blocks[:, 8:].reshape(-1, GROUPS_PER_BLOCK, 16))
    return (scales[..., None] * _TABLES["nl"].take(codes)).reshape(len(blocks), -1)


def _unpack_two_bits(blocks: Bytes) -> Bytes:
    """Unpack the 2-bit codes in bytes (n, 64), four per byte, to one code per byte, (n, 16, 16).

    Each 32 bytes hold 128 codes: first the lowest two bits of all 32 bytes, then the next two, and so on.
    """
    pairs: Bytes = (blocks.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(-1, 16, 16)
    return pairs


def _dequantize_q2_k(blocks: Bytes) -> Float32:
    """Dequantize Q2_K blocks (n, 84) to weights (n, 256): d sc q - dmin m.

    Each of the first 16 bytes has a 4-bit sc and a 4-bit m.
    """
    scales, minima = (
        _read_scales(blocks, 80) * (blocks[:, :16] & np.uint8(15)),
        _read_scales(blocks, 82) * (blocks[:, :16] >> np.uint8(4)),
    )
    floats = scales[..., None] * _unpack_two_bits(blocks[:, 16:80]) - minima[..., None]
    return np.ascontiguousarray(floats.reshape(len(blocks), -1), np.float32)


def _dequantize_q3_k(blocks: Bytes) -> Float32:
    """Dequantize Q3_K blocks (n, 110) to weights (n, 256): d (sc - 32) (q - 4).

    The 6-bit sc are packed into 12 bytes. The third bit of q is in the first 32 bytes, bit j for each 32 weights of group j.
    """
    lower = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], 1)
    upper = np.concatenate([blocks[:, 104:108] >> np.uint8(shift) & 3 for shift in (0, 2, 4, 6)], 1)
    scales = _read_scales(blocks, 108) * ((lower | upper << 4).view(np.int8) - np.int8(32))
    thirds = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    codes = (_unpack_two_bits(blocks[:, 32:96]) | thirds << 2).view(np.int8) - np.int8(4)
    floats: Float32 = (scales[..., None] * codes).reshape(len(blocks), -1)
    return floats


def _has_fp16_exponents(blocks: Bytes) -> bool:
    """Return whether the scale of each MXFP4 block (n, 17) is a power of two in fp16's range; blocks of zeros need not be."""
    in_range = (blocks[:, 0] >= MIN_FP16_EXPONENT) & (blocks[:, 0] <= MAX_FP16_EXPONENT)
    return bool(in_range.all()) or not (blocks[~in_range, 1:] & 0x77).any()


MIN_FP16_EXPONENT, MAX_FP16_EXPONENT = 128 - 24, 128 + 15
BLOCKS = {
    "Q8_0": BlockFormat(32, 34, (0,), _dequantize_q8_0),
    "Q4_0": BlockFormat(32, 18, (0,), _dequantize_q4_0),
    "Q4_1": BlockFormat(32, 20, (0, 2), _dequantize_q4_1),
    "Q5_0": BlockFormat(32, 22, (0,), _dequantize_q5_0),
    "Q5_1": BlockFormat(32, 24, (0, 2), _dequantize_q5_1),
    "Q4_K": BlockFormat(256, 144, (0, 2), _dequantize_q4_k),
    "Q5_K": BlockFormat(256, 176, (0, 2), _dequantize_q5_k),
    "Q6_K": BlockFormat(256, 210, (208,), _dequantize_q6_k),
    "Q2_K": BlockFormat(256, 84, (80, 82), _dequantize_q2_k),
    "Q3_K": BlockFormat(256, 110, (108,), _dequantize_q3_k),
    "IQ4_NL": BlockFormat(32, 18, (0,), _dequantize_iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, (0,), _dequantize_iq4_xs),
    "MXFP4": BlockFormat(32, 17, (), _dequantize_mxfp4, _has_fp16_exponents),
}


def dequantize(type_name: str, rows: Bytes) -> Float32:
    """Dequantize rows of quantized blocks (rows, bytes) to floats (rows, weights); type_name: a key of BLOCKS."""
    block = BLOCKS[type_name]
    return block.dequantize(rows.reshape(-1, block.n_bytes)).reshape(len(rows), -1)


@dataclass(frozen=True)
class BlockTensor:
    """A matrix in a file with rows of quantized blocks; [first:last] reads rows and dequantizes them to float32.

    Reading raises CheckpointError for scales that are not finite or not supported.

    Attributes:
        raw: The stored blocks as a tensor of bytes (rows, bytes), which can be sliced by rows.
        type: Name of the block format in `BLOCKS`.
        error_prefix: File and name of the tensor, for error messages.
    """

    raw: Any
    type: str
    error_prefix: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix in weights, not in bytes: (rows, weights per row)."""
        rows, n_bytes = self.raw.shape
        return rows, n_bytes // BLOCKS[self.type].n_bytes * BLOCKS[self.type].n_weights

    def __getitem__(self, index: slice) -> Float32:
        first, last, _ = index.indices(self.shape[0])
        return dequantize(self.type, self.read_blocks(first, last))

    def read_blocks(self, first: int, last: int) -> Bytes:
        """Read the quantized blocks of rows first to last - 1 as raw bytes, (last - first, bytes).

        Raises:
            CheckpointError: The file has changed, or a scale is NaN, infinite or not supported.
        """
        data: Bytes = self.raw[first:last]
        block = BLOCKS[self.type]
        for at in block.scale_offsets:
            upper = data.reshape(-1, block.n_bytes)[:, at + 1]
            if ((upper & 0x7C) == 0x7C).any():  # all exponent bits of the f16 are set
                raise CheckpointError(f"{self.error_prefix} holds NaN or infinite scales")
        if not block.is_supported(data.reshape(-1, block.n_bytes)):
            raise CheckpointError(f"{self.error_prefix} holds scales below 2^-24 or above 2^15, which are not supported")
        return data

    def flatten_matrices(self) -> "BlockTensor":
        """Return this tensor unchanged: its matrices are already stacked along the rows, as in `FileTensor.flatten_matrices`."""
        return self

    def slice_rows(self, first: int, last: int) -> "BlockTensor":
        """Return a view of rows first to last - 1, without reading them."""
        assert isinstance(self.raw, FileTensor)
        return replace(self, raw=self.raw.slice_rows(first, last))

    def select_rows(self, indices: Int64) -> "BlockTensor":
        """Return a tensor of the rows with the given indices, in the order of the indices, without reading them."""
        assert isinstance(self.raw, FileTensor)
        return replace(self, raw=self.raw.select_rows(indices))

    def reorder_heads(self, head_dim: int, rotary_dim: int, head_interleave: tuple[int, int] = (0, 1)) -> "BlockTensor":
        """Return a tensor with the rows of each attention head in the order of our RoPE, as in `FileTensor.reorder_heads`."""
        assert isinstance(self.raw, FileTensor)
        return replace(self, raw=self.raw.reorder_heads(head_dim, rotary_dim, head_interleave))


# MXFP4 in safetensors, with codes and exponents in two tensors (OCP's MX format of 2023): 32 weights are 16 bytes of two codes
# each, the lower half first, and a byte for their scale's exponent plus 127. A GGUF block begins with that byte; its lower halves
# are the first 16 codes.

MXFP4 = "MXFP4"
WEIGHTS_PER_BLOCK, BYTES_PER_BLOCK, *_ = BLOCKS[MXFP4]


def join_blocks(codes: FileTensor, exponents: FileTensor, n_rows: int, first: int, step: int) -> DerivedTensor:
    """Join the codes and exponents of an MXFP4 matrix into rows of GGUF blocks, a tensor (n_rows, bytes) computed on reading.

    Args:
        codes: Stored codes, (rows, 16 bytes per block).
        exponents: Stored exponents, (rows, blocks).
        n_rows: Rows of the result.
        first: The first stored row to take.
        step: Distance between the stored rows to take.
    """
    n_bytes = exponents.shape[1] * BYTES_PER_BLOCK

    def read_rows(begin: int, end: int) -> Bytes:
        stored_rows = slice(first + begin * step, first + end * step)
        packed, scales = codes[stored_rows][::step], exponents[stored_rows][::step]
        halves = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, 2, WEIGHTS_PER_BLOCK // 2)
        blocks = np.concatenate([scales[..., None], halves[..., 0, :] | halves[..., 1, :] << 4], -1)
        return blocks.reshape(len(scales), n_bytes)

    return DerivedTensor(codes, (n_rows, n_bytes), codes.dtype, read_rows)


def get_mxfp4_experts(source: Any, names: tuple[str, str], shape: tuple[int, ...], first: int, step: int) -> list[BlockTensor]:
    """Return one MXFP4 matrix per expert, from the two tensors in a folder that hold the codes and exponents of all experts.

    Args:
        source: The tensors of the folder, which are marked as used.
        names: Names of the codes tensor and of the exponents tensor.
        shape: Number of experts, and rows and columns of each matrix in the result.
        first: The first stored row to take of each expert.
        step: Distance between the stored rows to take.

    Raises:
        CheckpointError: A tensor is missing, or its shape or type does not match.
    """
    (codes, exponents), (n, n_rows, n_columns) = names, shape
    n_stored_rows, n_blocks = n_rows * step, n_columns // WEIGHTS_PER_BLOCK
    if n_columns % WEIGHTS_PER_BLOCK:
        raise CheckpointError(
            f"{source.path}: {codes} has rows of {n_columns} weights; expected a multiple of {WEIGHTS_PER_BLOCK}"
        )

    def get_flat(name: str, *row: int) -> FileTensor:
        stored: FileTensor = source.get_tensor(name, (n, n_stored_rows, *row), {"U8": BYTE})
        return replace(stored, shape=(n * n_stored_rows, math.prod(row)))

    stored_pair = get_flat(codes, n_blocks, WEIGHTS_PER_BLOCK // 2), get_flat(exponents, n_blocks)
    slices = ([each.slice_rows(i * n_stored_rows, (i + 1) * n_stored_rows) for each in stored_pair] for i in range(n))
    rows = [join_blocks(expert_codes, expert_exponents, n_rows, first, step) for expert_codes, expert_exponents in slices]
    return [BlockTensor(each, MXFP4, f"{source.path} is damaged: {codes}") for each in rows]
