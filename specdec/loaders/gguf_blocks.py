"""Tensors of quantized blocks in files: those of GGUF's block types, and MXFP4 and ternary weights in safetensors."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec.argument_checks import CheckpointError
from specdec.loaders.checkpoint import BYTE, DerivedTensor, FileTensor
from specdec.loaders.model_file import Bytes
from specdec.quant.gguf_repacking import (
    BLOCK_TYPES,
    MAX_FP16_EXPONENT,
    MAX_NVFP4_SCALE,
    MIN_FP16_EXPONENT,
    MXFP4,
    NVFP4,
    dequantize,
)
from specdec.quant.packed_matrix import GGUFBlockRows, to_float32
from specdec.runtime.simd import Float32, Int64


def has_fp16_exponents(blocks: Bytes) -> bool:
    """Return whether the scale of each MXFP4 block (n, 17) is a power of two in fp16's range; blocks of zeros need not be."""
    in_range = (blocks[:, 0] >= MIN_FP16_EXPONENT) & (blocks[:, 0] <= MAX_FP16_EXPONENT)
    return bool(in_range.all()) or not (blocks[~in_range, 1:] & 0x77).any()


@dataclass(frozen=True)
class BlockTensor:
    """A matrix in a file with rows of quantized blocks; [first:last] reads rows and dequantizes them to float32.

    Reading raises CheckpointError for scales that are not finite or not supported.

    Attributes:
        raw: The stored blocks as a tensor of bytes (rows, bytes), which can be sliced by rows.
        type: Name of the block type in `BLOCK_TYPES`.
        error_prefix: File and name of the tensor, for error messages.
        scales: Factor of each row, (rows,), or None.
    """

    raw: Any
    type: str
    error_prefix: str
    scales: Float32 | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix in weights, not in bytes: (rows, weights per row)."""
        rows, n_bytes = self.raw.shape
        return rows, n_bytes // BLOCK_TYPES[self.type].n_bytes * BLOCK_TYPES[self.type].layout.block_columns

    def __getitem__(self, index: slice) -> Float32:
        """Read the rows of a slice and return them as float32."""
        first, last, _ = index.indices(self.shape[0])
        return dequantize(self.read_blocks(first, last))

    def read_blocks(self, first: int, last: int) -> GGUFBlockRows:
        """Read the quantized blocks of rows first to last - 1.

        Raises:
            CheckpointError: The file has changed, or a scale is NaN, infinite or not supported.
        """
        data: Bytes = self.raw[first:last]
        block = BLOCK_TYPES[self.type]
        blocks = data.reshape(-1, block.n_bytes)
        for at in block.scale_offsets:
            upper = blocks[:, at + 1]
            if ((upper & 0x7C) == 0x7C).any():  # all exponent bits of the f16 are set
                raise CheckpointError(f"{self.error_prefix} holds NaN or infinite scales")
        if self.type == NVFP4 and (blocks[:, :4] > MAX_NVFP4_SCALE).any():
            raise CheckpointError(f"{self.error_prefix} holds NaN or negative scales")
        if self.type == MXFP4 and not has_fp16_exponents(blocks):
            raise CheckpointError(f"{self.error_prefix} holds scales below 2^-24 or above 2^15, which are not supported")
        return GGUFBlockRows(self.type, data, self._get_scales(slice(first, last)))

    def _get_scales(self, rows: slice | Int64) -> Float32 | None:
        return None if self.scales is None else self.scales[rows]

    def flatten_matrices(self) -> "BlockTensor":
        """Return this tensor unchanged: its matrices are already stacked along the rows, as in `FileTensor.flatten_matrices`."""
        return self

    def slice_rows(self, first: int, last: int) -> "BlockTensor":
        """Return a view of rows first to last - 1, without reading them."""
        assert isinstance(self.raw, FileTensor)
        return replace(self, raw=self.raw.slice_rows(first, last), scales=self._get_scales(slice(first, last)))

    def select_rows(self, indices: Int64) -> "BlockTensor":
        """Return a tensor of the rows with the given indices, in the order of the indices, without reading them."""
        return replace(self, raw=self.raw.select_rows(indices), scales=self._get_scales(indices))


# MXFP4 in safetensors, with codes and exponents in two tensors (OCP's MX format of 2023): 32 weights are 16 bytes of two codes
# each, the lower half first, and a byte for their scale's exponent plus 127. A GGUF block begins with that byte; its lower halves
# are the first 16 codes.

WEIGHTS_PER_BLOCK, BYTES_PER_BLOCK = 32, 17


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


# Ternary weights of BitNet in safetensors (transformers' integrations/bitnet.py): byte r of a column holds the codes of rows r,
# r + n / 4, r + n / 2 and r + 3 n / 4, the first in the lowest bits. They become blocks of TQ2_0.

TERNARY, TERNARY_COLUMNS, WEIGHTS_PER_BYTE = "TQ2_0", 256, 4


def get_ternary_matrix(source: Any, names: tuple[str, str], shape: tuple[int, ...]) -> BlockTensor:
    """Return a matrix of ternary weights as GGUF blocks, from the tensors in a folder that hold its codes and its scale.

    Args:
        source: The tensors of the folder, which are marked as used.
        names: Names of the codes tensor and of the scale tensor.
        shape: Rows and columns of the matrix.

    Raises:
        CheckpointError: A tensor is missing, its shape or type does not match, or the scale is not an fp16 number.
    """
    (n_rows, n_columns), (codes_name, scale_name) = shape, names
    if n_rows % WEIGHTS_PER_BYTE or n_columns % TERNARY_COLUMNS:
        raise CheckpointError(
            f"{source.path}: {codes_name} has the shape {(n_rows, n_columns)}; "
            f"expected multiples of {WEIGHTS_PER_BYTE} and {TERNARY_COLUMNS}"
        )
    n_stored = n_rows // WEIGHTS_PER_BYTE
    codes: FileTensor = source.get_tensor(codes_name, (n_stored, n_columns), {"U8": BYTE})
    scale = to_float32(source.get_tensor(scale_name, (1,))[:])
    with np.errstate(over="ignore"):
        fp16_scale = scale.astype(np.float16)
    if fp16_scale != scale:
        raise CheckpointError(f"{source.path}: {scale_name} is {scale[0]}; expected a number that fp16 can hold")
    n_blocks = n_columns // TERNARY_COLUMNS
    n_bytes = n_blocks * BLOCK_TYPES[TERNARY].n_bytes

    def read_rows(first: int, last: int) -> Bytes:
        rows = np.arange(first, last)
        stored = codes.select_rows(rows % n_stored)[:]
        row_codes = stored >> (2 * (rows // n_stored)).astype(np.uint8)[:, None] & 3
        quarters = row_codes.reshape(len(rows), n_blocks, 2, WEIGHTS_PER_BYTE, 32)
        packed = np.bitwise_or.reduce(quarters << np.arange(0, 8, 2, dtype=np.uint8)[:, None], 3)
        scales = np.broadcast_to(fp16_scale.view(np.uint8), (len(rows), n_blocks, 2))
        return np.concatenate([packed.reshape(len(rows), n_blocks, 64), scales], -1).reshape(len(rows), n_bytes)

    raw = DerivedTensor(codes, (n_rows, n_bytes), codes.dtype, read_rows)
    return BlockTensor(raw, TERNARY, f"{source.path} is damaged: {codes_name}")
