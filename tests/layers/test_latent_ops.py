"""The dot products of latent attention: compared with float64, and the same bits in any company."""

import numba
import numpy as np
import pytest

from specdec.layers.latent_ops import DotArgs, compute_dots
from specdec.quant.matmul import Rows, point_by_dtype, point_to_floats
from specdec.runtime.simd import PANEL_ROWS, round_up


@numba.njit
def run(out, rows, queries, n_panels, n_rows, n_queries):
    dots, queries = Rows(point_to_floats(out, 0), out.shape[1]), Rows(point_to_floats(queries, 0), queries.shape[1])
    args = DotArgs(dots, point_by_dtype(rows, 0), rows.shape[1] * PANEL_ROWS, queries, n_panels)
    compute_dots(args, n_rows, n_queries)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("n", [1, 31, 96, 576])
def test_dot_products_are_accurate_and_do_not_depend_on_the_number_of_queries(n, dtype):
    rng, width, n_rows = np.random.default_rng(0), round_up(n, PANEL_ROWS), 2 * PANEL_ROWS
    numbers = (rng.standard_normal((n_rows, width)) * (10 if dtype is np.int8 else 1)).astype(dtype)
    numbers[:, n:] = 0
    panels = np.ascontiguousarray(numbers.reshape(n_rows, -1, PANEL_ROWS).swapaxes(0, 1))
    queries = np.zeros((8, width), np.float32)
    queries[:, :n] = rng.standard_normal((8, n))
    exact = queries.astype(np.float64) @ numbers.astype(np.float64).T
    stored, alone = panels.view(np.uint16) if dtype is np.float16 else panels, np.zeros((8, n_rows), np.float32)
    for i in range(8):
        run(alone[i : i + 1], stored, queries[i : i + 1], width // PANEL_ROWS, n_rows, 1)
    np.testing.assert_allclose(alone, exact, rtol=0, atol=2e-6 * np.sqrt(n) * np.abs(numbers.astype(np.float64)).max())
    for n_queries in range(1, 9):
        out = np.zeros((8, n_rows), np.float32)
        run(out, stored, queries, width // PANEL_ROWS, n_rows, n_queries)
        np.testing.assert_array_equal(out[:n_queries], alone[:n_queries])
        assert not out[n_queries:].any()
