"""Conversion of MXFP4 blocks in safetensors, with separate codes and exponents, to GGUF's blocks.

The OCP's MX format of 2023: 32 weights are 16 bytes of two codes each, the lower half first, and a byte for their scale's
exponent plus 127. A GGUF block begins with that byte; its lower halves are the first 16 codes.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import Bytes, DerivedTensor, FileTensor
from specdec.loaders.gguf_dequantize import BLOCKS, BlockTensor
from specdec.loaders.safetensors import BYTE_DTYPES

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
        stored: FileTensor = source.get_tensor(name, (n, n_stored_rows, *row), BYTE_DTYPES)
        return replace(stored, shape=(n * n_stored_rows, math.prod(row)))

    stored_pair = get_flat(codes, n_blocks, WEIGHTS_PER_BLOCK // 2), get_flat(exponents, n_blocks)
    slices = ([each.slice_rows(i * n_stored_rows, (i + 1) * n_stored_rows) for each in stored_pair] for i in range(n))
    rows = [join_blocks(expert_codes, expert_exponents, n_rows, first, step) for expert_codes, expert_exponents in slices]
    return [BlockTensor(each, MXFP4, f"{source.path} is damaged: {codes}") for each in rows]
