"""bf16 and fp16 weights: exact widening, and products equal to fp32's of the widened weights bit for bit."""

import functools
import os
import subprocess
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest

from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.quant import BF16, FP16, FP32, INT8, WeightFormat, choose_weight_format
from specdec.quant.fp32 import get_float_activations
from specdec.quant.matmul import Tile, make_float_tile, make_matmul
from specdec.quant.packed_matrix import Floats, pack_matrix, to_float32
from specdec.runtime.memory import all_finite
from specdec.runtime.op_program import Kernel
from specdec.runtime.simd import LANES, PORTABLE_FP16_STORAGE, load, load_bf16, make_load, store
from tests.tools.checkpoint_files import ROOT, random_tensors
from tests.tools.half_precision import assert_same_bits, assert_same_products, half_tensors, to_half, widen_exactly, widen_tensors
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, random_tokens, run_in_blocks

ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
FORMATS = {"bf16": BF16, "fp16": FP16}
portable_matmul = make_matmul(Tile(functools.partial(make_float_tile, PORTABLE_FP16_STORAGE)), get_float_activations)
load_portable_fp16 = make_load(PORTABLE_FP16_STORAGE)


PORTABLE_FP16 = replace(FP16, matmul=Kernel(portable_matmul, cache=False))


@numba.njit
def load_all(bf16, fp16, portable_fp16, bits):
    for i in range(0, bits.size, LANES):
        store(bf16, i, load_bf16(bits, i))
        store(fp16, i, load(bits, i))
        store(portable_fp16, i, load_portable_fp16(bits, i))


def test_every_16_bit_float_widens_exactly() -> None:
    bf16, fp16, portable = (np.empty(ALL_BITS.size, np.float32) for _ in range(3))
    load_all(bf16, fp16, portable, ALL_BITS)
    expected = widen_exactly(ALL_BITS.view(np.float16))
    is_number = ~np.isnan(expected)
    for got in (fp16, portable, to_float32(ALL_BITS.view(np.float16))):
        assert_same_bits(got[is_number], expected[is_number])
        assert np.isnan(got[~is_number]).all()
    assert_same_bits(bf16, widen_exactly(ALL_BITS))
    assert_same_bits(to_float32(ALL_BITS), widen_exactly(ALL_BITS))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (16,), (7, 33)])
def test_rows_of_any_size_widen_and_float32_is_not_copied(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for format_name in FORMATS:
        assert_same_bits(to_float32(to_half(numbers, format_name)), widen_exactly(to_half(numbers, format_name)))
    assert to_float32(numbers) is numbers


def random_weights(rows: int, n: int, format_name: str) -> Floats:
    """Numbers of every magnitude: half of them are random bits, the other half is near 1."""
    rng = np.random.default_rng(n)
    bits = rng.integers(0, 1 << 16, (rows, n)).astype(np.uint16)
    bits[:, ::7] &= 0x83FF if format_name == "fp16" else 0x807F  # subnormal
    dtype = np.float16 if format_name == "fp16" else np.uint16
    normal = to_half(rng.standard_normal((rows, n)).astype(np.float32), format_name)
    numbers = np.where(rng.random((rows, n)) < 0.5, bits, normal.view(np.uint16)).view(dtype)
    return np.where(np.abs(widen_exactly(numbers)) < 1e30, numbers, normal)  # sums stay finite


@pytest.mark.campaign
@pytest.mark.parametrize("weight_format", [BF16, FP16, PORTABLE_FP16], ids=["bf16", "fp16", "portable fp16"])
@pytest.mark.parametrize(("rows", "n"), [(32, 64), (70, 33), (33, 1), (100, 2), (40, 577)])
def test_matmul_equals_that_of_widened_weights_bit_for_bit(weight_format: WeightFormat, rows: int, n: int) -> None:
    below, above = random_weights(rows, n, weight_format.name), random_weights(50, n, weight_format.name)
    for n_interleaved, w in ((1, [below, above]), (2, [below, below[::-1]])):
        matrix, wide = (
            pack_matrix(w, weight_format, n_interleaved),
            pack_matrix([widen_exactly(tensor) for tensor in w], FP32, n_interleaved),
        )
        assert_same_products(matrix, wide, n, range(1, 65))
        assert_same_bits(matrix[:], wide[:])
        assert 2 * matrix.panels.nbytes == wide.panels.nbytes


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_model_logits_equal_those_of_widened_weights_bit_for_bit(name: str, format_name: str) -> None:
    """Vary the batch and the number of threads; include norms and the embedding."""
    config = CONFIGS[name]
    tensors, tokens = half_tensors(config, format_name), random_tokens(config, 70)
    packed = LLAMA.plan_weights(config, tensors).pack()
    assert packed.format_names == format_name
    expected = run_in_blocks(Model(config, LLAMA.plan_weights(config, widen_tensors(tensors)).pack(), 1), tokens, 1)
    for n_threads in THREAD_COUNTS:
        model = Model(config, packed, n_threads, kv="f32")
        for chunk in (1, 2, 3, 7, 8, 9, 16, 64):
            assert_same_bits(run_in_blocks(model, tokens, chunk), expected)


@pytest.mark.parametrize("format_name", FORMATS)
def test_int8_and_fp32_copies_equal_those_of_widened_weights(format_name: str) -> None:
    for config in CONFIGS.values():
        tensors = half_tensors(config, format_name)
        packed = LLAMA.plan_weights(config, tensors).pack()
        for weight_format in (INT8, FP32):
            expected = LLAMA.plan_weights(config, widen_tensors(tensors), weight_format).pack()
            for copy in (LLAMA.plan_weights(config, tensors, weight_format).pack(), packed.convert(weight_format)):
                assert copy.format_names == weight_format.name
                for name, matrix in expected.matrices.items():
                    assert_same_bits(copy.matrices[name].panels, matrix.panels)


def test_weights_keep_their_format_and_mixed_ones_become_fp32() -> None:
    bf16, fp16, fp32 = (np.zeros((32, 4), dtype) for dtype in (np.uint16, np.float16, np.float32))
    assert [choose_weight_format([tensor, tensor]) for tensor in (bf16, fp16, fp32)] == [BF16, FP16, FP32]
    assert [choose_weight_format(mixed) for mixed in ([bf16, fp16], [fp32, bf16], [fp16, fp32])] == [FP32] * 3
    assert choose_weight_format([bf16], INT8) is INT8
    config = CONFIGS["gqa"]
    tensors = half_tensors(config, "bf16")
    tensors["wk"] = random_tensors(config, 1)["wk"]
    packed = LLAMA.plan_weights(config, tensors).pack()
    assert packed.format_names == "bf16 and fp32"
    tokens = random_tokens(config, 20)
    expected = Model(config, LLAMA.plan_weights(config, widen_tensors(tensors)).pack(), 1, kv="f16")
    assert_same_bits(run_in_blocks(Model(config, packed, 1), tokens, 8), run_in_blocks(expected, tokens, 8))


def test_matrix_with_a_wrong_shape_is_rejected() -> None:
    config = CONFIGS["gqa"]
    with pytest.raises(ValueError, match=r"w2 has the shape \(64, 171\); this config needs \(64, 172\)"):
        LLAMA.plan_weights(config, random_tensors(config, 0) | {"w2": np.zeros((2, 64, 171), np.uint16)}).pack()


@pytest.mark.parametrize(
    ("weight_format", "other"), [(BF16, np.float32), (BF16, np.float16), (FP16, np.uint16), (FP16, np.float32)]
)
def test_lossy_conversion_to_half_precision_is_rejected(weight_format: WeightFormat, other: type) -> None:
    with pytest.raises(ValueError, match=f"cannot be converted to {weight_format.name}"):
        pack_matrix([np.zeros((3, 4), other)], weight_format)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 1000])
def test_one_nonfinite_number_is_found_at_any_index(size: int) -> None:
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


COMPARE_EMBEDDINGS = """
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from specdec.quant.packed_matrix import pack_matrix, to_float32
bits = np.arange(64, dtype=np.uint16).reshape(2, 32) + np.uint16(0x3C00)
for weight_format, rows in ((BF16, bits), (FP16, bits.view(np.float16))):
    out, matrix = zeros(2, 32), pack_matrix([rows], weight_format)
    Executor([[matrix.embed(out, np.arange(2))]])(2, 0, 0, 1)
    print(weight_format.embed.is_compiled, out.tolist() == to_float32(rows).tolist())
"""


def test_kernels_compiled_by_two_processes_are_not_confused(tmp_path):
    """Each is the first function that its process compiles, with the same number, and both differ only in what they load."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for code in ("BF16.embed.address", "FP16.embed.address", COMPARE_EMBEDDINGS):
        code = f"import numpy as np\nfrom specdec.quant import BF16, FP16\n{code}"
        process = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
    assert process.stdout.split() == ["True"] * 4
