"""Grouped weights: GGUF's block types, int4 and int3: their values, their products, and the promise of equal bits."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft import self_copy
from specdec.draft.settings import parse_quantize
from specdec.loaders.model_paths import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.quant import FP32, INT3, INT4, INT8, choose_weight_format, int3, int4
from specdec.quant.gguf_repacking import BLOCK_TYPES, WEIGHT_FORMATS
from specdec.quant.groupwise import get_bit_fields, make_tile, pack_codes, unpack_codes
from specdec.quant.int8 import DOT4_NAME
from specdec.quant.matmul import make_matmul
from specdec.quant.packed_matrix import pack_matrix
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor, Kernel
from specdec.runtime.simd import PANEL_ROWS
from tests.tools import reference
from tests.tools.block_tensors import ROWS, RUNS_HERE, N, RandomBlockTensor, run_matmul
from tests.tools.checkpoint_files import random_tensors
from tests.tools.random_models import CONFIGS, THREAD_COUNTS, random_tokens, round_to_float32, run_in_blocks

MIXES = {
    ("Q4_K", "Q6_K", "Q5_K"): "mixed K",
    ("Q4_0", "Q5_0", "Q8_0"): "Q8_0",
    ("Q5_1", "Q8_0", "Q4_0"): "mixed",
    ("Q6_K", "Q8_0"): "fp32",
    ("Q4_0", "Q5_0"): "Q5_0",
    ("Q5_0", "Q4_1", "Q4_0"): "Q5_1",
    ("Q4_1", "Q4_0"): "Q4_1",
    ("MXFP4", "Q8_0"): "fp32",
    ("Q2_K", "Q6_K", "Q3_K"): "mixed K",
    ("IQ4_XS", "Q6_K"): "fp32",
    ("Q1_0", "Q2_0", "Q4_0"): "fp32",
}


def make_tensor(type_: str, seed: int) -> np.ndarray | RandomBlockTensor:
    if type_:
        return RandomBlockTensor(type_, ROWS, N, seed)
    return np.random.default_rng(seed).standard_normal((ROWS, N)).astype(np.float32)


def activations(n_tokens: int, n: int = N) -> np.ndarray:
    x = zeros(n_tokens, n)
    x[:] = np.random.default_rng(5).standard_normal(x.shape)
    return x


@pytest.mark.parametrize("types", [*((name,) for name in BLOCK_TYPES), *MIXES], ids="+".join)
def test_block_types_keep_their_values_and_multiply_like_floats(types):
    """Bit for bit, except where types mix in one with minima, which adds a rounding.

    Products are within the error of int8 activations.
    """
    tensors = [make_tensor(name, i) for i, name in enumerate(types)]
    weight_format = choose_weight_format(tensors)
    assert weight_format.name == MIXES.get(types, types[0])
    adds_minima = len({BLOCK_TYPES[name].layout.has_minima for name in types}) > 1
    matrix = pack_matrix(tensors, weight_format)
    stored = matrix[:]
    expected = np.zeros_like(stored)
    for i, tensor in enumerate(tensors):
        first = i * -(-ROWS // PANEL_ROWS) * PANEL_ROWS
        expected[first : first + ROWS] = tensor[0:ROWS]
    np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-6 if adds_minima else 0)
    x = activations(9)
    floats = x.astype(np.float64) @ expected.astype(np.float64).T
    assert np.abs(run_matmul(matrix, x, 9) - floats).max() < 0.01 * np.abs(floats).max()
    tokens = np.array([3, 69, 31, 1, 0])
    rows = zeros(5, N)
    Executor([[matrix.embed(rows, tokens)]])(5, 0, 0, 1)
    np.testing.assert_array_equal(rows, stored[tokens])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_type_takes_no_more_memory_than_its_file_except_for_wider_scales(name):
    n_bytes, layout, *_ = BLOCK_TYPES[name]
    row_block_bytes = 4 * layout.block_words / PANEL_ROWS
    ratios = {"Q4_K": 1.03, "Q5_K": 1.03, "IQ4_XS": 1.03, "Q3_K": 1.04, "TQ1_0": 1.23}  # 6-bit factors are stored as bytes
    assert row_block_bytes <= ratios.get(name, 1) * n_bytes


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_bit_of_a_word_is_one_bit_of_one_code(name):
    layout = BLOCK_TYPES[name].layout
    bits = [
        ((field.word, field.shift + i), (k, field.to + i))
        for k, fields in enumerate(get_bit_fields(layout))
        for field in fields
        for i in range(field.n_bits)
    ]
    first_bit = 2 - layout.bits if layout.bits < 2 else 0
    stored, codes = ([*each] for each in zip(*bits, strict=True))
    assert sorted(stored) == [(word, bit) for word in range(layout.unit_words) for bit in range(8)]
    n_code_words = layout.unit_groups * layout.group_size // 4
    assert sorted(codes) == [(k, first_bit + bit) for k in range(n_code_words) for bit in range(layout.bits)]
    words = np.random.default_rng(0).integers(0, 2**32, (2, 3, layout.n_units * layout.unit_words), np.uint32)
    layout = layout._replace(codebook="")
    np.testing.assert_array_equal(pack_codes(layout, unpack_codes(layout, words)), words)


@pytest.mark.parametrize(
    "name", ["Q4_1", "Q5_0", "Q4_K", "Q6_K", "MXFP4", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "Q1_0", "Q2_0", "TQ2_0", "NVFP4"]
)
def test_matmul_is_exact_in_a_group_and_one_chain_over_groups(name):
    """Compared with exact arithmetic, rounded after every step of the chain."""
    layout, tensor = BLOCK_TYPES[name].layout, RandomBlockTensor(name, ROWS, N)
    if layout.has_row_scales:
        tensor.scales = np.random.default_rng(1).random(ROWS, np.float32)
    x = activations(9)
    out = run_matmul(pack_matrix([tensor], WEIGHT_FORMATS[name]), x, 9)
    scales, minima, codes = split_into_groups(name, tensor)
    for t, r in ((0, 0), (1, 3), (3, 35), (8, 69)):
        acc = np.float32(0)
        x_codes, x_scales = reference.quantize_activations(x[t], layout.group_size)
        for g, x_scale in enumerate(x_scales):
            group_codes = x_codes.reshape(-1, layout.group_size)[g]
            total = Fraction(int(codes[r, g] @ group_codes)) * Fraction(float(scales[r, g] * np.float32(x_scale)))
            acc = round_to_float32(total + Fraction(float(acc)))
            if layout.has_minima:
                x_sum = np.float32(group_codes.sum()) * np.float32(x_scale)
                acc = round_to_float32(Fraction(float(minima[r, g])) * Fraction(float(x_sum)) + Fraction(float(acc)))
        assert out[t, r] == acc


def split_into_groups(name, tensor):
    """Return scales and minima (rows, groups) and codes (rows, groups, group size) of the packed weights."""
    layout = BLOCK_TYPES[name].layout
    weights = tensor[0:ROWS].reshape(ROWS, -1, layout.group_size)
    matrix = pack_matrix([tensor], WEIGHT_FORMATS[name])
    blocks = matrix.panels[:, : N // layout.block_columns]
    params = blocks[..., : layout.factors_offset].view(np.float16).astype(np.float32)
    params = params.reshape(*blocks.shape[:2], -1, 1, PANEL_ROWS)
    factors = blocks[..., layout.factors_offset : layout.codes_offset].view(np.int8)
    if name == "MXFP4":
        exponents = factors.view(np.uint8).astype(np.float64)
        params = np.where(exponents > 0, 2 ** (exponents - 127), 0).astype(np.float32)[:, :, None, None]
    elif name == "NVFP4":
        params = layout.byte_scales[factors.view(np.uint8)].reshape(*blocks.shape[:2], 1, layout.n_groups, PANEL_ROWS)
        params = params * matrix.panels[:, -1:, None, None, :PANEL_ROWS]
    elif name == "Q2_K":
        factors = factors.reshape(*blocks.shape[:2], 1, layout.n_groups, PANEL_ROWS)
        params = params * np.concatenate([factors & 15, factors >> 4 & 15], 2)
    elif layout.n_groups > 1:
        params = params * factors.reshape(*blocks.shape[:2], layout.n_params, layout.n_groups, PANEL_ROWS)
    per_group = [params[:, :, i].transpose(0, 3, 1, 2).reshape(-1, weights.shape[1])[:ROWS] for i in range(layout.n_params)]
    scales, minima = per_group[0], per_group[1] if layout.has_minima else np.zeros_like(per_group[0])
    divisor = np.where(scales == 0, 1, scales)[..., None].astype(np.float64)
    return scales, minima, np.rint((weights - minima[..., None].astype(np.float64)) / divisor).astype(int)


def make_format(name, instruction_set):
    return replace(
        WEIGHT_FORMATS[name],
        matmul=Kernel(make_matmul(*make_tile(BLOCK_TYPES[name].layout, instruction_set)), cache=False),
    )


@pytest.mark.parametrize("name", [*BLOCK_TYPES, "int4", "int3"])
def test_matmul_bits_do_not_depend_on_batch_or_threads(name):
    quantized = {"int4": INT4, "int3": INT3}
    matrix = pack_matrix([make_tensor("" if name in quantized else name, 0)], (WEIGHT_FORMATS | quantized)[name])
    x = activations(64)
    alone = np.concatenate([run_matmul(matrix, x[t : t + 1], 1) for t in range(64)])
    for n_threads in THREAD_COUNTS:
        for n_tokens in range(1, 65):
            out = run_matmul(matrix, x, n_tokens, n_threads)
            np.testing.assert_array_equal(out.view(np.int32), alone[:n_tokens].view(np.int32))


@pytest.mark.campaign
@pytest.mark.parametrize("instruction_set", [instruction_set for instruction_set in RUNS_HERE if instruction_set != DOT4_NAME])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q6_K", "Q8_0", "Q2_K", "Q3_K", "MXFP4", "Q1_0", "Q2_0", "TQ2_0", "NVFP4"])
def test_every_instruction_set_gives_the_same_bits(name, instruction_set):
    """Includes rows and tokens of the largest codes, which nearly fill 16-bit sums."""
    if not RUNS_HERE[instruction_set]:
        pytest.skip(f"this CPU has no {instruction_set}")
    tensor, x = RandomBlockTensor(name, ROWS, N), activations(11)
    codes = tensor.raw.reshape(ROWS, -1, BLOCK_TYPES[name].n_bytes)[:, :, 1 if name == "MXFP4" else 4 : -4]
    codes[5], codes[6], codes[7] = 0xFF, 0x80, 0x7F
    x[1], x[2], x[9] = 1, -1, np.resize([1, -1], N)
    best, other = (
        run_matmul(pack_matrix([tensor], weight_format), x, 11)
        for weight_format in (WEIGHT_FORMATS[name], make_format(name, instruction_set))
    )
    np.testing.assert_array_equal(best.view(np.int32), other.view(np.int32))


def min_max_error(rows: np.ndarray) -> np.ndarray:
    """Return the squared error of each group of 32 if its range is divided into 15 steps."""
    groups = rows.reshape(len(rows), -1, 32).astype(np.float64)
    low, width = groups.min(-1, keepdims=True), np.ptp(groups, axis=-1, keepdims=True)
    steps = np.where(width > 0, width / 15, 1)
    return ((np.rint((groups - low) / steps) * steps + low - groups) ** 2).sum(-1)


def test_int4_error_is_smaller_than_that_of_min_max_scaling():
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((200, 576)) * rng.random((200, 1))).astype(np.float32)
    matrix = pack_matrix([rows], INT4)
    error = ((matrix[:200] - rows).reshape(200, -1, 32).astype(np.float64) ** 2).sum(-1)
    assert error.sum() < 0.85 * min_max_error(rows).sum()
    assert (error < 1.05 * min_max_error(rows) + 1e-9).all()  # fp16 rounding


def test_int3_error_is_smaller_than_that_of_scaling_by_the_largest_weight():
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((200, 640)) * rng.random((200, 1))).astype(np.float32)
    groups = rows.reshape(200, -1, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)
    scaled = np.clip(np.rint(groups / (largest / -4)), -4, 3) * (largest / -4)
    errors = [((other - groups) ** 2).sum(2) for other in (pack_matrix([rows], INT3)[:200].reshape(groups.shape), scaled)]
    assert errors[0].sum() < 0.88 * errors[1].sum()


def test_int4_of_weights_with_few_bits_is_exact():
    codes = np.random.default_rng(0).integers(0, 16, (40, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    rows = (codes * 0.25 - 2).astype(np.float32)
    rows[7], rows[8] = 0, -3
    matrix = pack_matrix([rows], INT4)
    np.testing.assert_array_equal(matrix[:40], rows)


def test_int3_of_weights_with_few_bits_is_exact():
    rng = np.random.default_rng(0)
    codes, factors = rng.integers(-4, 4, (40, 16, 16)), rng.integers(1, 128, (40, 16, 1)) * rng.choice([-1, 1], (40, 16, 1))
    codes[:, :, 0], codes[:, :, 1], factors[:, ::8] = -4, 3, 127
    rows = (codes * factors / 1024).astype(np.float32).reshape(40, 256)
    np.testing.assert_array_equal(pack_matrix([rows], INT3)[:40], rows)


@pytest.mark.parametrize(("module", "n_params"), [(int4, 2), (int3, 1)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_weight_stays_nonfinite(module, n_params, bad):
    rows = np.ones((3, 3 * module.LAYOUT.block_columns), np.float32)
    rows[1, rows.shape[1] // 2] = bad
    numbers = module.quantize(rows).params.view(np.float16)
    assert np.isnan(numbers[1, 1]).all()
    assert np.isfinite(np.delete(numbers.reshape(-1, n_params), 4, 0)).all()


@pytest.mark.parametrize(("weight_format", "least", "error"), [(INT4, 1e-5, 0.2), (INT3, 1e-3, 0.3)])
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-7, 1e-5, 1e-3, 1e4, 1e6, 1e30])
def test_tiny_and_huge_weights_are_finite_and_close_within_fp16_range(weight_format, least, error, size):
    rows = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32) * np.float32(size)
    got = pack_matrix([rows], weight_format)[:40]
    assert np.isfinite(got).all()
    if least <= size <= 1e4:
        assert np.abs(got - rows).max() < error * np.abs(rows).max()
    assert np.abs(got).max() <= 2 * max(np.abs(rows).max(), 6e-8 * 127 * 4)


@pytest.mark.parametrize("weight_format", [INT4, INT3])
def test_a_row_may_end_inside_a_group(weight_format):
    rows = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    matrix = pack_matrix([rows], weight_format)
    x = zeros(3, 64)
    x[:, :50] = np.random.default_rng(1).standard_normal((3, 50))
    x[:, 50:] = np.nan
    stored = matrix[:40]
    expected = x[:, :50] @ stored.T
    np.testing.assert_allclose(run_matmul(matrix, x, 3)[:, :40], expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_int4_logits_match_its_floats_and_do_not_depend_on_the_batch(name):
    config = CONFIGS[name]
    weights = LLAMA.plan_weights(config, random_tensors(config, 0, 0.1), INT4).pack()
    tokens = random_tokens(config, 40)
    logits = run_in_blocks(Model(config, weights, 1), tokens, 1)
    floats = run_in_blocks(Model(config, weights.convert(FP32), 1), tokens, 8)
    assert np.abs(logits - floats).max() < 0.1 * np.abs(floats).max()
    for n_threads in THREAD_COUNTS:
        for chunk in (2, 9, 40):
            got = run_in_blocks(Model(config, weights, n_threads), tokens, chunk)
            np.testing.assert_array_equal(got.view(np.int32), logits.view(np.int32))


def test_parse_quantize_returns_the_format_of_each_model():
    for text, formats in {
        "none": (None, None, False),
        "draft": (None, None, True),
        "target": (INT8, None, False),
        "both": (INT8, None, True),
        "draft=int4": (None, INT4, False),
        "both=int4": (INT4, INT4, False),
        "draft=int3": (None, INT3, False),
        "target=int8,draft=int4": (INT8, INT4, False),
        "both=int8,draft=none": (INT8, None, False),
    }.items():
        parsed = parse_quantize(text)
        assert (parsed.target, parsed.draft, parsed.is_draft_auto) == formats


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("Q8_0", INT4, "int4"),
        ("Q6_K", INT4, "int4"),
        ("Q5_0", INT4, "int4"),
        ("Q4_K", INT4, "Q4_K"),
        ("Q4_1", INT4, "Q4_1"),
        ("Q4_K", INT3, "int3"),
        ("Q3_K", INT3, "Q3_K"),
        ("Q8_0", INT8, "Q8_0"),
        ("Q6_K", INT8, "Q6_K"),
        ("Q8_0", None, "Q8_0"),
    ],
)
def test_block_types_are_quantized_to_formats_of_fewer_bytes(stored, requested, expected):
    assert choose_weight_format([SimpleNamespace(type=stored, shape=(ROWS, N))], requested).name == expected


@pytest.mark.parametrize(
    "text", ["", "int4", "draft=", "draft=int5", "draft,", "none,draft", "draft int4 and int8", "draft==int4", None, 4]
)
def test_parse_quantize_rejects_unknown_values(text):
    with pytest.raises(ValueError, match=r"^quantize is .* expected none, or draft, target or both, alone or as in"):
        parse_quantize(text)


@pytest.mark.parametrize(
    ("quantize", "weights"),
    [
        ("draft", "target fp32, draft int8"),  # a small model
        ("draft=int4", "target fp32, draft int4 and int8"),
        ("target", "target int8, draft int4 and int8"),
        ("target=int8,draft=int4", "target int8, draft int4 and int8"),
        ("draft=int3", "target fp32, draft int3 and int4"),
    ],
)
def test_self_draft_has_fewer_bits_than_the_target(quantize, weights):
    decoder = SpeculativeDecoder(DEFAULT_TARGET, "self", quantize=quantize, gamma=4)
    assert decoder.weights == weights
    text, statistics = decoder.generate("Once upon a time", 60, temperature=0.0)
    alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    assert text == alone.generate("Once upon a time", 60, temperature=0.0).text
    assert statistics.acceptance_rate > 0.7


@pytest.mark.parametrize(("accepted", "weights"), [(None, "int4 and int8"), (0.87, "int4 and int8"), (0.83, "int8")])
def test_large_self_draft_is_int4_if_acceptance_is_high_enough(monkeypatch, accepted, weights):
    """stories6M reaches 0.95 (None); given the bytes of both formats, int4 needs 0.85."""
    monkeypatch.setattr(self_copy, "MAX_CACHED_BYTES", 0)
    if accepted is not None:
        monkeypatch.setattr(self_copy, "estimate_acceptance", lambda *_: accepted)
    assert SpeculativeDecoder(DEFAULT_TARGET, "self").weights == f"target fp32, draft {weights}"


def test_estimated_acceptance_is_that_of_rejection_sampling():
    """40,000 draws with a fixed seed; 4 standard deviations are a false alarm in one of 16,000 seeds."""
    decoder = SpeculativeDecoder(DEFAULT_TARGET, DEFAULT_DRAFT)
    tokens = decoder.encode("Once upon a time there was a little girl who")
    ps, qs = (
        [reference.softmax(row.astype(float)) for row in run_in_blocks(model, tokens, len(tokens))]
        for model in (decoder.target, decoder.draft)
    )
    rng, n = np.random.default_rng(5), 40_000 // len(tokens)
    accepted = 0
    for p, q in zip(ps, qs, strict=True):
        drawn = rng.choice(len(q), n, p=q)
        accepted += (rng.random(n) * q[drawn] < p[drawn]).sum()
    estimate = self_copy.estimate_acceptance(decoder.target, decoder.draft, tokens)
    assert abs(accepted / (n * len(tokens)) - estimate) < 4 * (estimate * (1 - estimate) / (n * len(tokens))) ** 0.5
    assert self_copy.estimate_acceptance(decoder.target, decoder.target, tokens) == pytest.approx(1)


def test_estimated_speedup_is_that_of_the_best_draft_length():
    """Simulated: draft tokens are accepted independently, and the first rejected one ends the draft."""
    rng = np.random.default_rng(5)
    for accepted, cost in ((0.78, 0.36), (0.95, 0.53), (0.97, 0.36)):
        runs = np.cumprod(rng.random((20_000, 24)) < accepted, 1)
        best = max((1 + runs[:, :gamma].sum(1).mean()) / (1 + gamma * cost) for gamma in range(1, 25))
        assert self_copy.estimate_speed_up(accepted, cost) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("quantize", ["target=int4", "both=int8", "target,draft=int8", "both=int4"])
def test_quantized_target_is_rejected_as_its_own_draft(quantize):
    with pytest.raises(ValueError, match=r"the target is int[48].* already, .* not a faster draft"):
        SpeculativeDecoder(DEFAULT_TARGET, "self", quantize=quantize)
