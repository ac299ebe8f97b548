"""bf16 in 12 bits: every weight comes back to the bit, products and models are those of bf16, nothing outside is read."""

import ctypes
import pickle
from dataclasses import replace

import numpy as np
import pytest

from specdec.model import architecture
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import BF16, FP16, FP32, INT8, PACKED_BF16, Kind, bf16_packed, bf16_packed_llvm, bf16_trial, kind_for
from specdec.quant.matmul import Product
from specdec.quant.matrix import Floats, Matrix, NoRoom, pack
from specdec.runtime.memory import Block, zeros
from specdec.runtime.program import NUMBERS, Operation, Pass, Runner
from specdec.runtime.simd import ceil_div, round_up
from specdec.runtime.tile import STRIP_ROWS, make_tile
from specdec.runtime.work_stealing import share
from tests.quant.test_half import assert_same_bits, exact, half_tensors, widened
from tests.tools.random_models import CONFIGS, THREADS, product, run_in_blocks, tokens_for

portable_tile, _ = make_tile(
    "portable_packed_tile", bf16_packed_llvm.packed_body(("", 64)), bf16_packed_llvm.packed_shape, bf16_packed.MOST_TOKENS
)


def portable_product(run: Pass, thread: int, p: Product) -> None:
    bf16_packed.multiply_by(portable_tile, run, thread, p)


def product_in_parts(run: Pass, thread: int, p: Product) -> None:
    bf16_packed.multiply_parts(run, thread, p)


def part_words(n: int, group: int) -> int:
    return bf16_packed.PART * STRIP_ROWS


CONFIG = CONFIGS["gqa"]
PORTABLE = replace(PACKED_BF16, product=Operation(portable_product, kept=False))
IN_PARTS = replace(PACKED_BF16, product=Operation(product_in_parts, kept=False), scratch_words=part_words)


def normal(rows: int, n: int, seed: int = 0) -> Floats:
    numbers = np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32) * np.float32(0.02)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def strange(rows: int, n: int, seed: int, n_strange: int = 3) -> Floats:
    """A few columns hold whatever bits there are, NaN, infinities, subnormals and zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    numbers = normal(rows, n, seed)
    columns = rng.choice(n, n_strange)
    numbers[:, columns] = rng.integers(0, 1 << 16, (rows, n_strange))
    special = [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x0000, 0x8000]
    at = rng.integers(0, rows, len(special)), rng.choice(columns, len(special))
    numbers[at] = special
    return numbers


def unpacked(matrix: Matrix, first: int, rows: int) -> Floats:
    """The bits of bf16 of so many rows from a strip on."""
    floats = matrix.kind.rows(matrix.strips, matrix.n, 0)[first * STRIP_ROWS :][:rows]
    assert not np.any(floats.view(np.uint32) & 0xFFFF)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def embedded(matrix: Matrix, tokens: list[int], n_threads: int = 1) -> Floats:
    out = zeros(len(tokens), round_up(matrix.n, STRIP_ROWS))
    out[:] = np.nan
    Runner([[matrix.embedding(out, np.array(tokens))]])(len(tokens), 0, 0, n_threads)
    assert not out[:, matrix.n :].any()
    return out[:, : matrix.n]


@pytest.fixture
def room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices have few slots."""
    monkeypatch.setattr(bf16_packed, "QUADS_PER_SLOT", 1)


def test_every_weight_of_50_matrices_comes_back_whatever_it_is(room_for_all: None) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        rows, n = int(rng.integers(1, 200)), 4 * int(rng.integers(16, 120))
        below, above = strange(rows, n, seed), strange(rows + 7, n, seed + 100, 1)
        matrix = pack([below, above], PACKED_BF16)
        np.testing.assert_array_equal(unpacked(matrix, 0, rows), below)
        np.testing.assert_array_equal(unpacked(matrix, ceil_div(rows, STRIP_ROWS), rows + 7), above)
        tokens = [int(token) for token in rng.integers(0, rows, 5)]
        assert_same_bits(embedded(matrix, tokens, n_threads=1 + seed % 2), exact(below[tokens]))


def test_a_part_fills_the_columns_that_it_goes_on_with(room_for_all: None) -> None:
    """As any kind does: what scales rows, or adds to them, waits for nobody."""
    matrix, tokens, out = pack([normal(70, 68)], PACKED_BF16), np.array([3, 69]), zeros(2, 96)
    whole = embedded(matrix, [3, 69])
    row = matrix.embedding(out, tokens)
    runner, entry = Runner([[row]]), ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(row.operation.address)
    for n_parts in (1, 2, 3, 5):
        first = np.zeros_like(whole)
        first[:, : share(68, 0, n_parts)[1]] = whole[:, : share(68, 0, n_parts)[1]]
        out[:] = 0
        NUMBERS.pack_into(runner._run.data, 0, 2, 0, 0, 1, 2, *runner._alone)
        entry(*runner._addresses, 0, 0, n_parts, 1)  # the first of so many
        np.testing.assert_array_equal(out[:, :68], first)


def test_any_bits_come_back_where_the_pool_has_room_for_all(room_for_all: None) -> None:
    """Every number of 16 bits, and each quad in the pool."""
    bits = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16)).reshape(256, 256)
    matrix = pack([bits], PACKED_BF16)
    np.testing.assert_array_equal(unpacked(matrix, 0, 256), bits)
    assert_same_bits(embedded(matrix, [255, 0, 31]), exact(bits[[255, 0, 31]]))
    from_the_middle = PACKED_BF16.rows(matrix.strips, 256, 0, slice(3, 5))
    assert_same_bits(from_the_middle, exact(bits[3 * STRIP_ROWS : 5 * STRIP_ROWS]))


@pytest.mark.parametrize("kind", [PACKED_BF16, PORTABLE, IN_PARTS], ids=["native", "portable", "in parts"])
@pytest.mark.parametrize(("rows", "n"), [(70, 64), (40, 580)])
def test_a_product_is_that_of_bf16_bit_for_bit(room_for_all: None, kind: Kind, rows: int, n: int) -> None:
    w = [strange(rows, n, 0), strange(rows, n, 1)]
    w = [np.where(np.abs(exact(part)) < 1e30, part, normal(rows, n)) for part in w]  # sums stay finite
    rng = np.random.default_rng(0)
    for turns in (1, 2):
        matrix, plain = pack(w, kind, turns), pack(w, BF16, turns)
        x, start = zeros(64, round_up(n, 32)), rng.standard_normal((64, matrix.n_rows)).astype(np.float32)
        x[:] = rng.standard_normal(x.shape)
        x[:, n:] = np.nan
        for n_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64):
            got, expected = zeros(n_tokens, matrix.n_rows), zeros(n_tokens, matrix.n_rows)
            got[:] = expected[:] = start[:n_tokens]
            product(matrix, got, x[:n_tokens], adding=n_tokens % 2 == 0)
            product(plain, expected, x[:n_tokens], adding=n_tokens % 2 == 0)
            assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["gqa", "head_dim_48"])
def test_a_models_logits_are_those_of_bf16_bit_for_bit(room_for_all: None, name: str) -> None:
    config = CONFIGS[name]
    tensors, tokens = half_tensors(config, "bf16"), tokens_for(config, 70)
    weights = LLAMA.pack(config, tensors, PACKED_BF16)
    assert {matrix.kind for matrix in weights.matrices.values()} == {PACKED_BF16}
    expected = run_in_blocks(Transformer(config, LLAMA.pack(config, tensors), 1), tokens, 1)
    for n_threads in THREADS:
        model = Transformer(config, weights, n_threads)
        for block in (1, 2, 5, 8, 64):
            assert_same_bits(run_in_blocks(model, tokens, block), expected)
    again = pickle.loads(pickle.dumps(model))
    assert again.weights.kind == weights.kind
    assert_same_bits(run_in_blocks(again, tokens, 7), expected)


def test_a_copy_in_fewer_bits_is_that_of_bf16(room_for_all: None) -> None:
    tensors = half_tensors(CONFIG, "bf16")
    plain, weights = LLAMA.pack(CONFIG, tensors), LLAMA.pack(CONFIG, tensors, PACKED_BF16)
    for name, matrix in plain.converted(INT8).matrices.items():
        assert_same_bits(weights.converted(INT8).matrices[name].strips, matrix.strips)


def test_a_matrix_of_too_many_sizes_of_numbers_stays_bf16_and_its_room_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = half_tensors(CONFIG, "bf16")
    tensors["wo"] = np.random.default_rng(0).integers(0, 1 << 14, tensors["wo"].shape).astype(np.uint16)  # below 2
    with pytest.raises(NoRoom):
        pack([tensors["wo"][0]], PACKED_BF16)
    monkeypatch.setattr(bf16_packed, "QUADS_PER_SLOT", 2)
    plain, weights = LLAMA.pack(CONFIG, tensors), LLAMA.pack(CONFIG, tensors, PACKED_BF16)
    kinds = {name: matrix.kind for name, matrix in weights.matrices.items()}
    assert kinds == dict.fromkeys(kinds, PACKED_BF16) | {"0.wo": BF16, "1.wo": BF16}
    assert weights.kind == "bf16 and bf16 in 12 bits"
    tokens = tokens_for(CONFIG, 20)
    expected = run_in_blocks(Transformer(CONFIG, plain, 1), tokens, 8)
    assert_same_bits(run_in_blocks(Transformer(CONFIG, weights, 1), tokens, 8), expected)


def test_what_was_given_back_is_zeros_and_taken_again() -> None:
    block = Block(64, 64)
    kept = block.take(2, 16)
    kept[:] = 1.0
    block.take(32)[:] = 2.0
    block.give_back(32)
    again = block.take(96)
    assert not again.any() and again.ctypes.data == kept.ctypes.data + kept.nbytes
    assert kept.all() and block.share_taken == 1


def test_only_whole_quads_of_bf16_are_packed() -> None:
    bf16, fp16, fp32 = (np.zeros((32, 8), dtype) for dtype in (np.uint16, np.float16, np.float32))
    assert [kind_for([tensor], PACKED_BF16) for tensor in (bf16, fp16, fp32, bf16[:, :6])] == [PACKED_BF16, FP16, FP32, BF16]
    for other in (fp16, fp32):
        with pytest.raises(ValueError, match="does not become bf16"):
            pack([other], PACKED_BF16)


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_matrix_reads_nothing_outside_itself(seed: int) -> None:
    """Its heads and planes hold any bits; before and behind it lie NaN, which no product shows."""
    rows, n = 96, 128
    rng = np.random.default_rng(seed)
    strips = pack([normal(rows, n)], PACKED_BF16).strips
    around = zeros(3, *strips.shape)
    around.view(np.uint32)[:] = 0x7FC07FC0
    damaged = around[1]
    damaged.view(np.uint8)[:] = rng.integers(0, 1 << 6, strips.nbytes).reshape(damaged.view(np.uint8).shape)  # finite numbers
    words = damaged.view(np.uint32).reshape(-1)
    for strip in range(len(strips)):
        words[bf16_packed.quads_of(damaged, n // 4, strip)[0] - bf16_packed.FIRST_SLOT] = rng.choice([2**31, 2**32 - 1, 10**6, 5])
    matrix = Matrix(PACKED_BF16, damaged, n, 0)
    for kind in (PACKED_BF16, IN_PARTS):
        out, x = zeros(8, rows), zeros(8, n)
        x[:] = 1e-30
        product(replace(matrix, kind=kind), out, x)
        assert np.isfinite(out).all()
    assert np.isfinite(embedded(matrix, [0, 40, 95])).all()
    assert np.isfinite(PACKED_BF16.rows(damaged, n, 0)).all()


def test_packing_is_tried_on_what_is_large_enough_and_has_no_say_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = half_tensors(CONFIG, "bf16")
    assert not LLAMA.packing_may_pay(CONFIG, tensors)
    monkeypatch.setattr(architecture, "LEAST_WEIGHTS", 1)
    assert LLAMA.packing_may_pay(CONFIG, tensors) and not LLAMA.packing_may_pay(CONFIG, widened(tensors))
    for worth in (0.0, 1e9):
        monkeypatch.setattr(bf16_trial, "WORTH_IT", worth)
        assert LLAMA.packing_pays(CONFIG, tensors, 1) is (worth == 0.0)
    wild = {name: np.random.default_rng(0).integers(0, 1 << 14, t.shape).astype(np.uint16) for name, t in tensors.items()}
    assert not LLAMA.packing_pays(CONFIG, wild, 1)
