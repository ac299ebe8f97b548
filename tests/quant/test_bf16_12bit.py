"""bf16 packed in 12 bits: weights round-trip, products and models equal bf16's, and nothing outside a matrix is read."""

import ctypes
import functools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.loaders import model_loader
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.model_loader import Loader
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.quant import BF16, FP16, FP32, INT8, PACKED_BF16, WeightFormat, bf16_12bit, choose_weight_format
from specdec.quant.matmul import MatmulArgs
from specdec.quant.packed_matrix import Floats, Matrix, PackingOverflowError, pack_matrix
from specdec.runtime.memory import Arena, zeros
from specdec.runtime.op_program import CONTEXT_STRUCT, Executor, ForwardContext, Kernel, allocate_context
from specdec.runtime.simd import PANEL_ROWS, ceil_div, make_vector_op, round_up
from specdec.runtime.tile_simd import emit_word_lookup
from specdec.runtime.work_stealing import get_chunk_range
from tests.tools.half_precision import assert_same_bits, assert_same_products, half_tensors, to_half, widen_exactly, widen_tensors
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, random_tokens, run_in_blocks, run_product

portable_tile = bf16_12bit.make_tile(make_vector_op(2, functools.partial(emit_word_lookup, lookup=("", 64))))


def portable_matmul(run: ForwardContext, thread: int, p: MatmulArgs) -> None:
    bf16_12bit.multiply_packed(portable_tile, bf16_12bit.PACKED_TILE_LIMITS, run, thread, p)


def unpacked_matmul(run: ForwardContext, thread: int, p: MatmulArgs) -> None:
    bf16_12bit.multiply_unpacked(run, thread, p)


class UnpackedFormat(bf16_12bit.PackedBF16Format):
    def get_scratch_words(self, n: int, group_size: int) -> int:
        return bf16_12bit.UNPACK_COLUMNS * PANEL_ROWS


CONFIG = CONFIGS["gqa"]
PORTABLE = replace(PACKED_BF16, matmul=Kernel(portable_matmul, cache=False))
UNPACKED = UnpackedFormat(**vars(PACKED_BF16) | {"matmul": Kernel(unpacked_matmul, cache=False)})


def random_normal(rows: int, n: int, seed: int = 0) -> Floats:
    numbers = np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32) * np.float32(0.02)
    return to_half(numbers, "bf16")


def random_bits(rows: int, n: int, seed: int, n_random: int = 3) -> Floats:
    """Return normal weights with a few columns of random bits, including NaN, infinities, subnormals and zeros of both signs."""
    rng = np.random.default_rng(seed)
    numbers = random_normal(rows, n, seed)
    columns = rng.choice(n, n_random)
    numbers[:, columns] = rng.integers(0, 1 << 16, (rows, n_random))
    special = [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x0000, 0x8000]
    at = rng.integers(0, rows, len(special)), rng.choice(columns, len(special))
    numbers[at] = special
    return numbers


def unpack_bits(matrix: Matrix, first: int, rows: int) -> Floats:
    """Return the bits of that many rows as bf16, from a panel on."""
    floats = matrix[first * PANEL_ROWS : first * PANEL_ROWS + rows]
    assert not np.any(floats.view(np.uint32) & 0xFFFF)
    return to_half(floats, "bf16")


def run_embed(matrix: Matrix, tokens: list[int], n_threads: int = 1) -> Floats:
    out = zeros(len(tokens), round_up(matrix.n, PANEL_ROWS))
    out[:] = np.nan
    Executor([[matrix.embed(out, np.array(tokens))]])(len(tokens), 0, 0, n_threads)
    assert not out[:, matrix.n :].any()
    return out[:, : matrix.n]


@pytest.fixture
def slot_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve one slot per block: small matrices have few slots."""
    monkeypatch.setattr(bf16_12bit, "BLOCKS_PER_SLOT", 1)


def test_random_bits_round_trip_in_50_matrices(slot_per_block: None) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        rows, n = int(rng.integers(1, 200)), 4 * int(rng.integers(16, 120))
        below, above = random_bits(rows, n, seed), random_bits(rows + 7, n, seed + 100, 1)
        matrix = pack_matrix([below, above], PACKED_BF16)
        np.testing.assert_array_equal(unpack_bits(matrix, 0, rows), below)
        np.testing.assert_array_equal(unpack_bits(matrix, ceil_div(rows, PANEL_ROWS), rows + 7), above)
        tokens = [int(token) for token in rng.integers(0, rows, 5)]
        assert_same_bits(run_embed(matrix, tokens, n_threads=1 + seed % 2), widen_exactly(below[tokens]))


def test_embed_fills_the_columns_of_its_own_chunk(slot_per_block: None) -> None:
    """Ops on the embedded rows rely on this: they do not wait for other chunks."""
    matrix, tokens, out = pack_matrix([random_normal(70, 68)], PACKED_BF16), np.array([3, 69]), zeros(2, 96)
    whole = run_embed(matrix, [3, 69])
    op, context = matrix.embed(out, tokens), allocate_context()
    executor, entry = Executor([[op]]), ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(op.kernel.address)
    for n_chunks in (1, 2, 3, 5):
        first = np.zeros_like(whole)
        first[:, : get_chunk_range(68, 0, n_chunks)[1]] = whole[:, : get_chunk_range(68, 0, n_chunks)[1]]
        out[:] = 0
        CONTEXT_STRUCT.pack_into(context.data, 0, 2, 0, 0, 1, 2, 0, 1, context.ctypes.data)
        entry(context.ctypes.data, executor.ops.ctypes.data, 0, 0, n_chunks, 1)  # the first of n_chunks
        np.testing.assert_array_equal(out[:, :68], first)


def test_all_16_bit_values_round_trip_if_the_pool_is_large_enough(slot_per_block: None) -> None:
    """With every block in the overflow pool."""
    bits = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16)).reshape(256, 256)
    matrix = pack_matrix([bits], PACKED_BF16)
    np.testing.assert_array_equal(unpack_bits(matrix, 0, 256), bits)
    assert_same_bits(run_embed(matrix, [255, 0, 31]), widen_exactly(bits[[255, 0, 31]]))
    middle = matrix[3 * PANEL_ROWS : 5 * PANEL_ROWS]
    assert_same_bits(middle, widen_exactly(bits[3 * PANEL_ROWS : 5 * PANEL_ROWS]))


@pytest.mark.parametrize("weight_format", [PACKED_BF16, PORTABLE, UNPACKED], ids=["native", "portable", "unpacked"])
@pytest.mark.parametrize(("rows", "n"), [(70, 64), (40, 580)])
def test_matmul_equals_bf16_bit_for_bit(slot_per_block: None, weight_format: WeightFormat, rows: int, n: int) -> None:
    w = [random_bits(rows, n, 0), random_bits(rows, n, 1)]
    w = [np.where(np.abs(widen_exactly(tensor)) < 1e30, tensor, random_normal(rows, n)) for tensor in w]  # sums stay finite
    for n_interleaved in (1, 2):
        matrix, plain = pack_matrix(w, weight_format, n_interleaved), pack_matrix(w, BF16, n_interleaved)
        assert_same_products(matrix, plain, n, (*range(1, 10), 16, 17, 33, 64))


@pytest.mark.parametrize("name", ["gqa", "head_dim_48"])
def test_model_logits_equal_bf16_bit_for_bit(slot_per_block: None, name: str) -> None:
    config = CONFIGS[name]
    tensors, tokens = half_tensors(config, "bf16"), random_tokens(config, 70)
    weights = LLAMA.plan_weights(config, tensors, PACKED_BF16).pack()
    assert {matrix.weight_format for matrix in weights.matrices.values()} == {PACKED_BF16}
    expected = run_in_blocks(Model(config, LLAMA.plan_weights(config, tensors).pack(), 1), tokens, 1)
    for n_threads in THREAD_COUNTS:
        model = Model(config, weights, n_threads)
        for chunk in (1, 2, 5, 8, 64):
            assert_same_bits(run_in_blocks(model, tokens, chunk), expected)
    unpickled = pickle.loads(pickle.dumps(model))
    assert unpickled.weights.format_names == weights.format_names
    assert_same_bits(run_in_blocks(unpickled, tokens, 7), expected)


def test_int8_conversion_equals_that_of_bf16(slot_per_block: None) -> None:
    tensors = half_tensors(CONFIG, "bf16")
    plain, weights = LLAMA.plan_weights(CONFIG, tensors).pack(), LLAMA.plan_weights(CONFIG, tensors, PACKED_BF16).pack()
    for name, matrix in plain.convert(INT8).matrices.items():
        assert_same_bits(weights.convert(INT8).matrices[name].panels, matrix.panels)


def test_matrix_that_overflows_the_pool_stays_bf16_and_its_memory_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = half_tensors(CONFIG, "bf16")
    tensors["wo"] = np.random.default_rng(0).integers(0, 1 << 14, tensors["wo"].shape).astype(np.uint16)  # below 2
    with pytest.raises(PackingOverflowError):
        pack_matrix([tensors["wo"][0]], PACKED_BF16)
    monkeypatch.setattr(bf16_12bit, "BLOCKS_PER_SLOT", 2)
    plain, weights = LLAMA.plan_weights(CONFIG, tensors).pack(), LLAMA.plan_weights(CONFIG, tensors, PACKED_BF16).pack()
    formats = {name: matrix.weight_format for name, matrix in weights.matrices.items()}
    assert formats == dict.fromkeys(formats, PACKED_BF16) | {"0.wo": BF16, "1.wo": BF16}
    assert weights.format_names == "bf16 and bf16 in 12 bits"
    tokens = random_tokens(CONFIG, 20)
    expected = run_in_blocks(Model(CONFIG, plain, 1), tokens, 8)
    assert_same_bits(run_in_blocks(Model(CONFIG, weights, 1), tokens, 8), expected)
    kept = list[tuple[Any, str]]()
    LLAMA.plan_weights(CONFIG, tensors, PACKED_BF16).pack(keep=lambda *array: kept.append(array))
    arranged = LLAMA.plan_weights(CONFIG, tensors, PACKED_BF16).arrange(
        [array.reshape(-1) for array, _ in kept], [name for _, name in kept]
    )
    assert {name: matrix.weight_format for name, matrix in arranged.matrices.items()} == formats
    assert_same_bits(run_in_blocks(Model(CONFIG, arranged, 1), tokens, 8), expected)


def test_released_memory_is_zeroed_and_reused() -> None:
    arena = Arena(64, 64)
    first = arena.allocate(2, 16)
    first[:] = 1.0
    arena.allocate(32)[:] = 2.0
    arena.release_from(32)
    second = arena.allocate(96)
    assert not second.any() and second.ctypes.data == first.ctypes.data + first.nbytes
    assert first.all() and arena.used_fraction == 1


def test_only_bf16_with_a_multiple_of_4_columns_is_packed() -> None:
    bf16, fp16, fp32 = (np.zeros((32, 8), dtype) for dtype in (np.uint16, np.float16, np.float32))
    assert [choose_weight_format([tensor], PACKED_BF16) for tensor in (bf16, fp16, fp32, bf16[:, :6])] == [
        PACKED_BF16,
        FP16,
        FP32,
        BF16,
    ]
    for other in (fp16, fp32):
        with pytest.raises(ValueError, match="cannot be converted to bf16"):
            pack_matrix([other], PACKED_BF16)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_matrix_reads_nothing_outside_itself(seed: int) -> None:
    """Headers and blocks hold random bits; the memory around the matrix is NaN, which must not reach a product."""
    rows, n = 96, 128
    rng = np.random.default_rng(seed)
    panels = pack_matrix([random_normal(rows, n)], PACKED_BF16).panels
    around = zeros(3, *panels.shape)
    around.view(np.uint32)[:] = 0x7FC07FC0
    damaged = around[1]
    damaged.view(np.uint8)[:] = rng.integers(0, 1 << 6, panels.nbytes).reshape(damaged.view(np.uint8).shape)  # finite numbers
    words = damaged.view(np.uint32).reshape(-1)
    for panel in range(len(panels)):
        words[bf16_12bit.locate_blocks(damaged, n // 4, panel)[0] - bf16_12bit.FIRST_SLOT_WORD] = rng.choice(
            [2**31, 2**32 - 1, 10**6, 5]
        )
    matrix = Matrix(PACKED_BF16, damaged, n, 0)
    for weight_format in (PACKED_BF16, UNPACKED):
        out, x = zeros(8, rows), zeros(8, n)
        x[:] = 1e-30
        run_product(replace(matrix, weight_format=weight_format), out, x)
        assert np.isfinite(out).all()
    assert np.isfinite(run_embed(matrix, [0, 40, 95])).all()
    assert np.isfinite(matrix[:]).all()


def test_packing_is_chosen_for_large_bf16_models(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = half_tensors(CONFIG, "bf16")
    model, wide = (Checkpoint(Path("model"), CONFIG, each) for each in (tensors, widen_tensors(tensors)))
    monkeypatch.setattr(model_loader, "HAS_BYTE_LOOKUP", True)
    assert Loader().choose_weight_format(model, None) is None
    monkeypatch.setattr(model_loader, "MIN_PACKED_WEIGHTS", model_loader.count_packable_weights(model))
    assert Loader().choose_weight_format(model, None) is PACKED_BF16
    assert Loader().choose_weight_format(wide, None) is None
    assert Loader(pack_mode="none").choose_weight_format(model, None) is None
    monkeypatch.setattr(model_loader, "HAS_BYTE_LOOKUP", False)
    assert Loader().choose_weight_format(model, None) is None
    assert Loader(pack_mode="on").choose_weight_format(model, None) is PACKED_BF16
