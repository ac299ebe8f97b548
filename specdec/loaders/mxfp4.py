"""Blocks of MXFP4 as safetensors have them, codes and exponents apart, as the blocks of GGUF that hold the same.

The OCP's MX format of 2023: of 32 weights 16 bytes of two codes each, the lower half first, and a
byte that is the exponent of their scale plus 127. A block of GGUF begins with that byte, and its lower halves are the first 16.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import Bytes, Derived, FileTensor
from specdec.loaders.gguf_blocks import BLOCKS, BlockTensor
from specdec.loaders.safetensors import OCTETS

TYPE = "MXFP4"
N_WEIGHTS, N_BYTES, *_ = BLOCKS[TYPE]


def joined(codes: FileTensor, exponents: FileTensor, n_rows: int, first: int, step: int) -> Derived:
    """Rows (n_rows, bytes) of blocks as GGUF has them: of codes and of exponents each step-th row from the first on."""
    n_bytes = exponents.shape[1] * N_BYTES

    def rows(begin: int, end: int) -> Bytes:
        lines = slice(first + begin * step, first + end * step)
        own, scales = codes[lines][::step], exponents[lines][::step]
        halves = np.stack([own & 15, own >> 4], -1).reshape(*scales.shape, 2, N_WEIGHTS // 2)
        blocks = np.concatenate([scales[..., None], halves[..., 0, :] | halves[..., 1, :] << 4], -1)
        return blocks.reshape(len(scales), n_bytes)

    return Derived(codes, (n_rows, n_bytes), codes.dtype, rows)


def microscaled(source: Any, names: tuple[str, str], shape: tuple[int, ...], first: int, step: int) -> list[BlockTensor]:
    """A matrix for each expert, of shape (experts, rows, n), out of a folder's tensors of all.

    names: of the codes and of the exponents. Raises CheckpointError.
    """
    (codes, exponents), (n, n_rows, n_columns) = names, shape
    lines, groups = n_rows * step, n_columns // N_WEIGHTS
    if n_columns % N_WEIGHTS:
        raise CheckpointError(f"{source.path}: {codes} has rows of {n_columns} weights; blocks have {N_WEIGHTS} each")

    def flat(name: str, *row: int) -> FileTensor:
        stored: FileTensor = source.tensor(name, (n, lines, *row), OCTETS)
        return replace(stored, shape=(n * lines, math.prod(row)))

    both = flat(codes, groups, N_WEIGHTS // 2), flat(exponents, groups)
    parts = ([each.part(i * lines, (i + 1) * lines) for each in both] for i in range(n))
    rows = [joined(own, scales, n_rows, first, step) for own, scales in parts]
    return [BlockTensor(each, TYPE, f"{source.path} is damaged: {codes}") for each in rows]
