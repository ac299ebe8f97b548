"""Random tensors in half precision, and exact conversions."""

from collections.abc import Iterable

import numpy as np

from specdec.model_config import ModelConfig
from specdec.quant.packed_matrix import Floats, Matrix
from specdec.runtime.memory import zeros
from specdec.runtime.simd import round_up
from tests.tools.checkpoint_files import random_tensors
from tests.tools.random_models import run_product


def to_half(numbers: np.ndarray, name: str) -> Floats:
    """Convert float32 numbers to the 16 bits of a weight format, or keep them for others; bf16 rounds towards zero."""
    if "bf16" in name:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(np.float16) if name == "fp16" else numbers


def half_tensors(config: ModelConfig, format_name: str) -> dict[str, Floats]:
    return {name: to_half(tensor, format_name) for name, tensor in random_tensors(config, 0).items()}


def widen_tensors(tensors: dict[str, Floats]) -> dict[str, np.ndarray]:
    """Convert to float32 by numpy."""
    return {name: widen_exactly(tensor) for name, tensor in tensors.items()}


def widen_exactly(rows: Floats) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)


def assert_same_products(a: Matrix, b: Matrix, n: int, token_counts: Iterable[int]) -> None:
    """Check that products of random rows with n numbers, also added to others, have the same bits for two matrices."""
    rng = np.random.default_rng(0)
    x, start = zeros(64, round_up(n, 32)), rng.standard_normal((64, a.n_rows)).astype(np.float32)
    x[:] = rng.standard_normal(x.shape)
    x[:, n:] = np.nan
    for n_tokens in token_counts:
        got, expected = zeros(n_tokens, a.n_rows), zeros(n_tokens, a.n_rows)
        got[:] = expected[:] = start[:n_tokens]
        run_product(a, got, x[:n_tokens], adding=n_tokens % 2 == 0)
        run_product(b, expected, x[:n_tokens], adding=n_tokens % 2 == 0)
        assert_same_bits(got, expected)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
