"""The matmul of floats: equal to its definition bit for bit."""

import numba
import numpy as np
import pytest

from specdec.quant import FP32
from specdec.quant.matmul import Tile, TileShape, make_pair_tile, multiply_reference
from specdec.quant.packed_matrix import pack_matrix
from specdec.runtime.memory import zeros
from specdec.runtime.simd import PANEL_ROWS, round_up
from tests.tools.random_models import run_product


@numba.njit
def run_reference(out, w, x):
    multiply_reference(out, w, x)


@pytest.mark.parametrize("n", [1, 2, 33])
@pytest.mark.parametrize("n_tokens", [*range(1, 10), 17])
def test_matmul_equals_its_definition_bit_for_bit(n: int, n_tokens: int) -> None:
    rng = np.random.default_rng(n)
    matrix = pack_matrix([rng.standard_normal((2 * PANEL_ROWS + 3, n)).astype(np.float32)], FP32)
    x = zeros(n_tokens, round_up(n, PANEL_ROWS))
    x[:] = rng.standard_normal(x.shape)
    out, expected = zeros(n_tokens, matrix.n_rows), zeros(n_tokens, matrix.n_rows)
    run_product(matrix, out, x)
    run_reference(expected, matrix.panels, x)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_a_cpu_with_few_registers_needs_no_tile_over_two_panels() -> None:
    tile = Tile(make_pair_tile, TileShape, max_tokens=0)
    assert tile.dispatcher.py_func(1, None) is None
