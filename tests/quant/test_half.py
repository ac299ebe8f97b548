"""bf16 and fp16: what a number of two bytes is, and products that are fp32's of the widened weights, bit for bit."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest

from specdec.config import Config
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import BF16, FP16, FP32, INT8, Kind, kind_for
from specdec.quant.fp32 import floats_of_x
from specdec.quant.matmul import product_by
from specdec.quant.matrix import Floats, floats, pack
from specdec.runtime.memory import all_finite, zeros
from specdec.runtime.program import Operation
from specdec.runtime.simd import LANES, PORTABLE_FP16_STORAGE, load_as, load_bf16, load_fp16, round_up, store
from specdec.runtime.tile import float_tile
from tests.tools.checkpoint_files import ROOT, random_tensors
from tests.tools.random_models import CONFIGS, THREADS, product, run_in_blocks, tokens_for

ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
KINDS = {"bf16": BF16, "fp16": FP16}
portable_product = product_by(*float_tile("portable_fp16_tile", PORTABLE_FP16_STORAGE), floats_of_x)
load_portable_fp16 = load_as(PORTABLE_FP16_STORAGE)


PORTABLE_FP16 = replace(FP16, product=Operation(portable_product, kept=False))


@numba.njit
def load_all(bf16, fp16, portable_fp16, bits):
    for i in range(0, bits.size, LANES):
        store(bf16, i, load_bf16(bits, i))
        store(fp16, i, load_fp16(bits, i))
        store(portable_fp16, i, load_portable_fp16(bits, i))


def halves(numbers: np.ndarray, kind: str) -> Floats:
    """The numbers in two bytes: bf16 towards zero."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else numbers.astype(np.float16)


def half_tensors(config: Config, kind: str) -> dict[str, Floats]:
    return {name: halves(tensor, kind) for name, tensor in random_tensors(config, 0).items()}


def widened(tensors: dict[str, Floats]) -> dict[str, np.ndarray]:
    """In float32, by numpy."""
    return {name: exact(tensor) for name, tensor in tensors.items()}


def exact(rows: Floats) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_every_number_of_two_bytes_widens_exactly_on_any_cpu() -> None:
    bf16, fp16, portable = (np.empty(ALL_BITS.size, np.float32) for _ in range(3))
    load_all(bf16, fp16, portable, ALL_BITS)
    expected = exact(ALL_BITS.view(np.float16))
    is_number = ~np.isnan(expected)
    for got in (fp16, portable, floats(ALL_BITS.view(np.float16))):
        assert_same_bits(got[is_number], expected[is_number])
        assert np.isnan(got[~is_number]).all()
    assert_same_bits(bf16, exact(ALL_BITS))
    assert_same_bits(floats(ALL_BITS), exact(ALL_BITS))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (16,), (7, 33)])
def test_rows_of_any_size_widen_and_floats_stay_where_they_are(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for kind in KINDS:
        assert_same_bits(floats(halves(numbers, kind)), exact(halves(numbers, kind)))
    assert floats(numbers) is numbers


def weights(rows: int, n: int, kind: str) -> Floats:
    """Numbers of every size that there is: the bits are drawn, not the numbers, and half of the exponents are near 1's."""
    rng = np.random.default_rng(n)
    drawn = rng.integers(0, 1 << 16, (rows, n)).astype(np.uint16)
    drawn[:, ::7] &= 0x83FF if kind == "fp16" else 0x807F  # subnormal
    dtype = np.float16 if kind == "fp16" else np.uint16
    normal = halves(rng.standard_normal((rows, n)).astype(np.float32), kind)
    numbers = np.where(rng.random((rows, n)) < 0.5, drawn, normal.view(np.uint16)).view(dtype)
    return np.where(np.abs(exact(numbers)) < 1e30, numbers, normal)  # sums stay finite


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [BF16, FP16, PORTABLE_FP16], ids=["bf16", "fp16", "portable fp16"])
@pytest.mark.parametrize(("rows", "n"), [(32, 64), (70, 33), (33, 1), (100, 2), (40, 577)])
def test_a_product_is_that_of_the_widened_weights_bit_for_bit(kind: Kind, rows: int, n: int) -> None:
    rng = np.random.default_rng(0)
    below, above = weights(rows, n, kind.name), weights(50, n, kind.name)
    for turns, w in ((1, [below, above]), (2, [below, below[::-1]])):
        matrix, wide = pack(w, kind, turns), pack([exact(part) for part in w], FP32, turns)
        x, start = zeros(64, round_up(n, 32)), rng.standard_normal((64, matrix.n_rows)).astype(np.float32)
        x[:] = rng.standard_normal(x.shape)
        for n_tokens in range(1, 65):
            got, expected = zeros(n_tokens, matrix.n_rows), zeros(n_tokens, matrix.n_rows)
            got[:] = expected[:] = start[:n_tokens]
            product(matrix, got, x[:n_tokens], adding=n_tokens % 2 == 0)
            product(wide, expected, x[:n_tokens], adding=n_tokens % 2 == 0)
            assert_same_bits(got, expected)
        assert_same_bits(matrix.kind.rows(matrix.strips, n, 0), wide.kind.rows(wide.strips, n, 0))
        assert 2 * matrix.strips.nbytes == wide.strips.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_logits_are_those_of_its_widened_weights_bit_for_bit(name: str, kind: str) -> None:
    """Whatever the batch and the threads; norms and the embedding too."""
    config = CONFIGS[name]
    tensors, tokens = half_tensors(config, kind), tokens_for(config, 70)
    packed = LLAMA.pack(config, tensors)
    assert packed.kind == kind
    expected = run_in_blocks(Transformer(config, LLAMA.pack(config, widened(tensors)), 1), tokens, 1)
    for n_threads in THREADS:
        model = Transformer(config, packed, n_threads, kv="f32")
        for block in (1, 2, 3, 7, 8, 9, 16, 64):
            assert_same_bits(run_in_blocks(model, tokens, block), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_int8_or_fp32_model_of_halves_is_that_of_their_floats_however_it_is_made(kind: str) -> None:
    for config in CONFIGS.values():
        tensors = half_tensors(config, kind)
        packed = LLAMA.pack(config, tensors)
        for to in (INT8, FP32):
            expected = LLAMA.pack(config, widened(tensors), to)
            for made in (LLAMA.pack(config, tensors, to), packed.converted(to)):
                assert made.kind == to.name
                for name, matrix in expected.matrices.items():
                    assert_same_bits(made.matrices[name].strips, matrix.strips)


def test_a_pickled_model_of_halves_is_the_same() -> None:
    config = CONFIGS["odd"]
    tokens = tokens_for(config, 20)
    for kind in KINDS:
        model = Transformer(config, LLAMA.pack(config, half_tensors(config, kind)), 1)
        again = pickle.loads(pickle.dumps(model))
        assert again.weights.kind == kind
        assert_same_bits(run_in_blocks(again, tokens, 7), run_in_blocks(model, tokens, 7))


def test_weights_stay_what_they_are_and_mixed_ones_become_fp32() -> None:
    bf16, fp16, fp32 = (np.zeros((32, 4), dtype) for dtype in (np.uint16, np.float16, np.float32))
    assert [kind_for([tensor, tensor]) for tensor in (bf16, fp16, fp32)] == [BF16, FP16, FP32]
    assert [kind_for(mixed) for mixed in ([bf16, fp16], [fp32, bf16], [fp16, fp32])] == [FP32] * 3
    assert kind_for([bf16], INT8) is INT8
    config = CONFIGS["gqa"]
    tensors = half_tensors(config, "bf16")
    tensors["wk"] = random_tensors(config, 1)["wk"]
    packed = LLAMA.pack(config, tensors)
    assert packed.kind == "bf16 and fp32"
    tokens = tokens_for(config, 20)
    expected = Transformer(config, LLAMA.pack(config, widened(tensors)), 1, kv="f16")
    assert_same_bits(run_in_blocks(Transformer(config, packed, 1), tokens, 8), run_in_blocks(expected, tokens, 8))


def test_a_matrix_of_another_shape_is_refused_before_it_is_packed() -> None:
    config = CONFIGS["gqa"]
    with pytest.raises(ValueError, match=r"w2 has the shape \(64, 171\); this config needs \(64, 172\)"):
        LLAMA.pack(config, random_tensors(config, 0) | {"w2": np.zeros((2, 64, 171), np.uint16)})


@pytest.mark.parametrize(("kind", "other"), [(BF16, np.float32), (BF16, np.float16), (FP16, np.uint16), (FP16, np.float32)])
def test_what_would_lose_bits_does_not_become_a_half(kind: Kind, other: type) -> None:
    with pytest.raises(ValueError, match=f"does not become {kind.name}"):
        pack([np.zeros((3, 4), other)], kind)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 1000])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(size: int) -> None:
    top = {np.dtype(np.uint16): 0x7F7F, np.dtype(np.float16): 0x7BFF}  # the largest number
    for dtype, largest in top.items():
        bits = np.full(size, largest, np.uint16)
        bits[::3], bits[1::3] = largest | 0x8000, 1
        assert all_finite(bits.view(dtype), 1) and all_finite(bits.view(dtype), 2)
        for at in {0, size // 2, size - 1}:
            for bad in (largest + 1, largest + 2, 0x8000 | (largest + 1), 0xFFFF):
                damaged = bits.copy()
                damaged[at] = bad
                assert not all_finite(damaged.view(dtype), 1)
                assert not all_finite(damaged.view(dtype), 2)


LOOK_UP = """
from specdec.runtime.memory import zeros
from specdec.runtime.program import Runner
from specdec.quant.matrix import pack
bits = np.arange(64, dtype=np.uint16).reshape(2, 32) + np.uint16(0x3C00)
for kind, rows in ((BF16, bits), (FP16, bits.view(np.float16))):
    out = zeros(2, 32)
    Runner([[pack([rows], kind).embedding(out, np.arange(2))]])(2, 0, 0, 1)
    print(kind.embed.is_compiled, out.tolist() == kind.rows(pack([rows], kind).strips, 32, 0)[:2].tolist())
"""


def test_what_two_processes_compiled_is_told_apart_by_one_that_loads_both(tmp_path):
    """Each is the first function that its process compiles, which is numbered, and both do the same but for what they load."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for code in ("BF16.embed.address", "FP16.embed.address", LOOK_UP):
        code = f"import numpy as np\nfrom specdec.quant import BF16, FP16\n{code}"
        told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True"] * 4
